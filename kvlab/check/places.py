"""Hypotheses about where a cache shows it: positions shifted, the future in sight, tokens missing, stored twice.

Each takes Evidence and returns a Finding, or None if it does not fit.
"""

from __future__ import annotations

from kvlab.check.evidence import Evidence, Finding, at


def shifted(e: Evidence) -> Finding | None:
    moved = e.misplaced
    by = {int(e.label[j]) - e.source_k[j].pos for j in moved}
    if len(by) != 1:
        return None
    by = by.pop()
    rest = any(e.right_k[j] for j in e.in_sight.nonzero().flatten().tolist())
    which = f"the key{'s' * (len(moved) > 1)} of {at(e.source_k[j].pos for j in moved)}" if rest else "all keys"
    effect = "sees the key after its own" if by < 0 else "misses its own key"
    return Finding(
        f"Positions are shifted by {by:+d}: view.pos labels {which} {abs(by)} too {'high' if by > 0 else 'low'}, so "
        f"that a query {effect}. Store the pos that append is given; do not count anew.",
        "labels",
    )


def future(e: Evidence) -> Finding | None:
    for t, q in enumerate(e.q.tolist()):
        for j in e.seen[t].nonzero().flatten().tolist():
            s = e.source_k.get(j)
            p = int(e.label[j]) if e.right_k[j] else s.pos if s is not None and e.is_own(s) else -1
            if p > q >= 0:
                first = min(e.truth) == int(e.q[e.q >= 0].min())
                why = (
                    "The view says all_visible=True, which holds only for a single new token."
                    if e.view.all_visible
                    else f"The view labels that key {int(e.label[j])}: the mask follows view.pos, so it must be right."
                )
                return Finding(
                    f"The mask sees the future: {'in the first pass' if first else 'in a chunk on a warm cache'}, "
                    f"query {q} sees the key of position {p}. {why}",
                    "mask" if e.view.all_visible else "labels",
                )


def scrambled(e: Evidence) -> Finding | None:
    if e.misplaced:
        pairs = ", ".join(f"{e.source_k[j].pos} is called {int(e.label[j])}" for j in e.misplaced[:3])
        return Finding(
            f"Positions are wrong in view.pos: the key of position {pairs}. view.pos[b, j] must be the position of the "
            "key in slot j; store the pos that append is given beside the key.",
            "labels",
        )


def settings(e: Evidence) -> Finding | None:
    v, c = e.view, e.config
    D, name = c.head_dim, "head_dim"
    if c.kv_lora_rank is not None:
        D, name = c.qk_nope_head_dim + c.qk_rope_head_dim, "qk_nope_head_dim + qk_rope_head_dim"
    if v.scale is not None and abs(v.scale * D**0.5 - 1) > 1e-9:
        return Finding(
            f"The view sets scale={v.scale:.4g}, but this model divides by the root of {name}={D}: {D**-0.5:.4g}. "
            "Leave scale=None.",
            "mask",
        )
    if v.window is not None and e.rule.window is None and e.missing():
        return Finding(
            f"The cache forgets: its views say window={v.window}, so older tokens are not seen. If that is what you "
            "want, check it with expect='window'."
        )


def beyond(e: Evidence) -> Finding | None:
    for t, q in enumerate(e.q.tolist()):
        seen = set(e.label[e.seen[t]].tolist()) - {-1}
        extra = [p for p in seen - e.may_see(q) if p <= q] if q >= 0 else []
        if extra and e.limit is not None:
            sinks = f" and the first {e.rule.sinks}" if e.rule.sinks else ""
            return Finding(
                f"The window is too wide: query {q} sees {at(extra)}, beyond the last {e.limit} keys{sinks}. A window "
                f"of {e.limit} counts the query's own key."
            )


def missing(e: Evidence) -> Finding | None:
    lack = e.missing()
    if e.rule.lossy:  # a lossy cache may drop tokens, but never the newest
        lack = {q: [q] for q, ps in lack.items() if q in ps}
    if not lack:
        return None
    q, ps = next(reversed(lack.items()))
    fed = {int(p) for p in e.q if p >= 0}
    if all(ps == [q] for q, ps in lack.items()):
        return Finding(
            f"The last token is missing: query {q} does not see its own key. Store the new keys and values first, then "
            "build the view from all of them."
        )
    if ps == [0] and any(len(x) > 1 for x in e.later().missing().values()):
        return missing(e.later())  # not the first alone, but the oldest, more at each step
    oldest = sorted(e.may_see(q))[: len(ps)]
    if ps == [0]:
        return Finding(
            f"The first token is lost: query {q} does not see position 0. Look for a slice that starts one too late, "
            "or a first call of append that stores nothing."
        )
    if ps == oldest and q not in ps:
        keep = q - max(ps)
        if set(range(q - keep + 1, q + 1)) == fed:
            return Finding(
                f"Earlier tokens are missing: query {q} sees only its own step ({at(fed)}), not {at(ps)}. Keep what "
                "earlier calls stored, and return old and new together."
            )
        if e.rule.window is None:
            return Finding(
                f"The cache forgets: query {q} sees only the last {keep} keys, not {at(ps)}. If that is what you want, "
                "set View.window and check it with expect='window'."
            )
        return Finding(
            f"The window is too narrow: query {q} sees only the last {keep} keys, not {at(ps)}; a window of {e.limit} "
            f"is {e.limit} keys, the query's own included. A ring needs `window` slots, and given a chunk it must show "
            "its old slots and the new keys before it overwrites any."
        )
    return Finding(
        f"Tokens are missing: query {q} does not see {at(ps)}. "
        + (
            "They came in a step of several tokens: write all T of them, not one, and move on by T."
            if len(ps) > 1
            else "Look at which slot it was written to, and whether something has overwritten it."
        )
    )


def twice(e: Evidence) -> Finding | None:
    for t, q in enumerate(e.q.tolist()):
        labels = e.label[e.seen[t]].tolist()
        if q >= 0 and len(labels) > len(set(labels)):
            double = [p for p in set(labels) if labels.count(p) > 1]
            return Finding(
                f"Tokens are stored twice: query {q} sees {at(double)} more than once, and softmax counts each copy. "
                "Append only the new tokens."
            )
