"""What is wrong with a cache, in words.

Each step of a run is recorded: the keys and values that append was given, and the View that it returned. `explain`
walks the records in order and stops at the first view that is not right, since later ones only inherit the mistake.
Evidence says which token each key and value in sight is; the hypotheses read off a cause; the first that fits speaks.
"""

from __future__ import annotations

from kvlab.check import contents, places
from kvlab.check.evidence import Evidence, Finding, Record, Rule, Token, at

HYPOTHESES = (
    contents.ghost, contents.layers, contents.padding, contents.rows, contents.heads, contents.stale, contents.turned,
    contents.rounded, contents.empty, contents.forgotten,
    places.shifted, places.future, places.scrambled, places.settings, places.missing, places.beyond, places.twice,
    contents.unknown,
)  # fmt: skip


def explain(records: list[Record], tokens: list[Token], run: str, rule: Rule, model, every: int = 1) -> Finding | None:
    """The first view that is not right, and the first hypothesis that fits it; None if every view is right.

    every: look at every n-th record only.
    """
    for i in range(0, len(records), every):
        for row in range(len(records[i].truth)):
            e = Evidence(records, i, row, rule, tokens, run, model)
            for hypothesis in HYPOTHESES:
                if finding := hypothesis(e):
                    fed = [p for p in records[i].pos[row].tolist() if p >= 0]
                    step = f"in the step that fed {at(fed)}" if fed else "in a step that fed only padding"
                    finding.text += f" Seen in layer {e.layer}, row {row}, {step}."
                    return finding
    return None
