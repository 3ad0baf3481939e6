"""The ring buffer, slot by slot: which token lies where, what is overwritten, what the query sees."""

from __future__ import annotations

from ..attention import visible
from ..caches.sliding import SlidingWindowCache
from .explorer import Explorer, choice, slider

TEXT = 24  # tokens of the text that is drawn


def ring(tokens: int, window: int, sinks: int = 0, sinks_at: str = "text", text: int = TEXT) -> dict:
    """The step that adds token `tokens` - 1 to a sliding cache: the text, the slots before and after, the distances.

    A slot's colour tells which turn of the ring wrote it. Positions are those of SlidingWindowCache itself, what is
    seen is what visible() says.
    """
    import torch

    cache = SlidingWindowCache(window=window, sinks=sinks)
    q = tokens - 1
    before, after = (cache.positions([n])[0].tolist() for n in (q, tokens))
    seen = visible(torch.tensor([[q]]), torch.arange(text)[None], window, sinks)[0, 0, 0].tolist()

    def turn(p):
        return max(p - sinks, 0) // window

    def state(p):
        return "new" if p == q else "sink" if p < sinks else "held"

    words = [{"text": str(p) if p <= q else "", "group": turn(p),
              "state": state(p) if seen[p] else "evicted" if p <= q else "free"} for p in range(text)]  # fmt: skip
    rows = [{"label": "the text", "cells": words}]
    for name, slots in (("slots before", before), ("slots after", after)):
        cells = []
        for old, now, p in zip(before, after, slots):
            gone = slots is before and old >= 0 and old != now
            kind = "free" if p < 0 else "evicted" if gone else state(p)
            cells.append({"text": str(p) if p >= 0 else "", "group": turn(max(p, 0)), "state": kind})
        rows.append({"label": name, "cells": cells})
    shift = max(0, q - (window + sinks - 1)) if sinks_at == "cache" else 0
    distances = [{"text": "" if p < 0 else str(q - p - (shift if p < sinks else 0)), "group": turn(max(p, 0)),
                  "state": "free" if p < 0 else state(p)} for p in after]  # fmt: skip
    rows.append({"label": "distance", "cells": distances})
    at, count = after.index(q), sum(seen[:tokens])
    where = f"Token {q} goes to slot {at}"
    if q >= sinks:
        where += f" = {f'{sinks} + ({q} - {sinks})' if sinks else q} mod {window}"
    over = before[at]
    over = f" and overwrites token {over}" if over >= 0 else ", which was empty"
    lost = tokens - count
    rest = f"{lost} {'token is' if lost == 1 else 'tokens are'} forgotten" if lost else "nothing is forgotten yet"
    return {
        "kind": "slots", "title": f"Window {window}, sinks {sinks}: token {q} arrives", "rows": rows,
        "states": {"held": "held (a colour a turn)", "new": "new", "sink": "sink, stays"},
        "sentence": f"{where}{over}. Its query sees {count} of {tokens} tokens; {rest}.",
    }  # fmt: skip


class RingExplorer(Explorer):
    """A ring buffer of window + sinks slots while a text of 24 tokens is written, one token a step."""

    def controls(self):
        return {
            "token": slider("token", range(TEXT), 11, "the token that arrives in this step"),
            "window": slider("window", range(1, 13), 6, "keys a query sees, its own included", "tokens"),
            "sinks": slider("sinks", range(5), 2, "first tokens of the text that are kept for good", "tokens"),
            "sinks_at": choice(
                "sinks' positions",
                [("where they were in the text", "text"), ("next to the window (StreamingLLM)", "cache")],
                "text",
                "which distance the query sees to a sink",
            ),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        return ring(values["token"] + 1, values["window"], values["sinks"], values["sinks_at"])
