"""The pictures of paging: what stands empty without it, block tables and reference counts, the rivals side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..caches.pool import BlockPool
from ..caches.row import Row
from ..serving.figures import Figures
from ..serving.first_fit import FirstFit
from . import theme

WORDS = ["of the prompt", "new"]  # groups 0 and 1 of a text
SHARED = len(theme.GROUPS) - 1


def padded_batch(texts: Sequence[tuple[int, int]]) -> dict:
    """A padded static batch when its last row ends. texts: (tokens of the prompt, new tokens) of each row."""
    longest, new = (max(column) for column in zip(*texts))
    rows, used = [], 0
    for i, (prompt, output) in enumerate(texts):
        cells = [{"state": "reserved"}] * (longest - prompt) + [{"group": 0}] * prompt
        cells += [{"group": 1}] * output + [{"state": "reserved"}] * (new - output)
        rows.append({"label": f"row {i}", "cells": cells})
        used += prompt + output
    every = len(texts) * (longest + new)
    return {
        "kind": "slots", "title": "A padded batch of texts, a cell is a token", "rows": rows, "groups": WORDS,
        "states": {"reserved": "padding"},
        "sentence": f"{used} of {every} slots hold a token: {theme.number(1 - used / every, '%')} is padding.",
    }  # fmt: skip


def reservation(texts: Sequence[tuple[int, int]], room: int) -> dict:
    """`room` slots reserved for each text. texts: (tokens of the prompt, new tokens so far)."""
    rows = []
    for i, (prompt, output) in enumerate(texts):
        cells = [{"group": 0}] * prompt + [{"group": 1}] * output
        rows.append({"label": f"row {i}", "cells": cells + [{"state": "reserved"}] * (room - len(cells))})
    used, every = sum(map(sum, texts)), room * len(texts)
    return {
        "kind": "slots", "title": f"{room} slots reserved for each text", "rows": rows, "groups": WORDS,
        "sentence": f"{used} of {every} slots hold a token: {theme.number(1 - used / every, '%')} is held and empty.",
    }  # fmt: skip


def first_fit(memory: FirstFit, names: Mapping[int, str], title: str, across: int = 16) -> dict:
    """A first-fit memory slot by slot. names: start of a range -> who has it."""
    cells = [{"state": "free"}] * memory.size
    for start, length in memory.held.items():
        group = sorted(names).index(start)
        cells[start : start + length] = [{"text": names[start], "group": group % SHARED}] * length
    rows = [{"label": f"{i}-{i + across - 1}", "cells": cells[i : i + across]} for i in range(0, memory.size, across)]
    gaps = ", ".join(f"{start} to {start + length - 1}" for start, length in memory.gaps) or "none"
    return {
        "kind": "slots", "title": title, "rows": rows, "states": {"held": "who has the slot"},
        "sentence": f"{memory.free} of {memory.size} slots are free ({gaps}); the longest gap: {memory.largest_gap}.",
    }  # fmt: skip


def block_pool(rows: Mapping[str, Row], pool: BlockPool, title: str, was: Mapping[str, int] | None = None) -> dict:
    """The block tables, and under them the pool, a block a column: how often it is named, and the positions in it.

    A block has its owner's colour, or grey where several share it; it is pale where it is free and its text can still
    be found. was: row -> its length before this step; what it has written since has a thick edge.
    """
    names, holders = list(rows), [[] for _ in range(pool.num_blocks)]  # block -> [(row, index in its table)]
    for name, row in rows.items():
        for i, block in enumerate(row.table):
            holders[block].append((name, i))
    groups = [names.index(held[0][0]) % SHARED if len(held) == 1 else SHARED for held in holders]
    lines = [
        {"label": f"table of {name}", "cells": [{"text": str(b), "group": groups[b]} for b in row.table]}
        for name, row in rows.items()
    ]
    state = ["held" if ref else "reserved" if b in pool.key_of else "free" for b, ref in enumerate(pool.ref)]
    turn = {block: str(i + 1) for i, block in enumerate(pool.free)}
    for label, words in (("block", range(pool.num_blocks)), ("reference count", pool.ref)):
        cells = [{"text": str(x), "group": g, "state": s} for x, g, s in zip(words, groups, state)]
        lines.append({"label": label, "cells": cells})
    for j in range(pool.block_size):
        cells = [_slot(rows, held, j, pool, block, was or {}) for block, held in enumerate(holders)]
        lines.append({"label": f"slot {j}", "cells": [c | {"group": g} for c, g in zip(cells, groups)]})
    if len(turn) < pool.num_blocks or pool.key_of:
        cells = [{"text": turn.get(b, ""), "group": SHARED, "state": s if b in turn else "free"}
                 for b, s in enumerate(state)]  # fmt: skip
        lines.append({"label": "taken next, order", "cells": cells})
    return {
        "kind": "slots", "title": title, "rows": lines, "size": (8.4, 1.1 + 0.4 * len(lines)),
        "states": {"held": "an owner's; grey: shared", "reserved": "free, its text kept", "new": "just written"},
    }  # fmt: skip


def _slot(rows, holders, j, pool, block, was) -> dict:
    """One slot of a block: the position of its token, which is the same for all who hold it."""
    if not holders:
        return {"state": "reserved" if block in pool.key_of else "free"}
    name, i = max(holders, key=lambda held: rows[held[0]].length)
    p = i * pool.block_size + j
    if p >= rows[name].length:
        return {"state": "free"}
    return {"text": str(p), "state": "new" if p >= was.get(name, rows[name].length) else "held"}


def chain(texts: Mapping[str, Sequence[int]], block_size: int) -> dict:
    """The keys of each text's full blocks, first digits of the hash; equal keys have equal colours."""
    groups: dict[bytes, int] = {}
    rows = []
    for name, ids in texts.items():
        key, words, keys = b"", [], []
        for start in range(0, len(ids), block_size):
            block = [int(i) for i in ids[start : start + block_size]]
            shown = " ".join(map(str, block))
            if len(block) < block_size:
                words.append({"text": shown, "state": "reserved", "group": SHARED})
                keys.append({"text": "none", "state": "reserved", "group": SHARED})
                continue
            key = BlockPool.chain(key, block)
            group = groups.setdefault(key, len(groups) % SHARED)
            words.append({"text": shown, "group": group})
            keys.append({"text": key.hex()[:6], "group": group})
        rows += [{"label": f"{name}: ids", "cells": words}, {"label": "key", "cells": keys}]
    return {
        "kind": "slots", "title": f"Blocks of {block_size} ids and their keys", "rows": rows,
        "states": {"held": "equal colour: one block serves both", "reserved": "not full: no key"},
    }  # fmt: skip


def boundary(lengths: Sequence[int], block_size: int) -> dict:
    """Texts of these lengths in blocks: where the last token lies, and where the next one goes."""
    rows = []
    for n in lengths:
        row = Row(BlockPool(-(-n // block_size) + 1, block_size))
        row.grow(n)
        slots = len(row.table) * block_size
        cells = [{"text": str(p), "group": p // block_size} for p in range(n)] + [{"state": "free"}] * (slots - n)
        row.length = n
        new = row.needs(n + 1)
        rows.append({"label": f"{n} tokens, {len(row.table)} block{'s' * (len(row.table) > 1)}", "cells": cells})
        rows[-1]["label"] += ", +1 now" if new else ""
    return {
        "kind": "slots", "title": f"Blocks of {block_size}: what the next token needs", "rows": rows,
        "states": {"held": "position; a colour is a block", "free": "a slot of the last block, empty"},
    }  # fmt: skip


def shares(found: Sequence[Figures]) -> dict:
    """What the memory held, on average over model steps: tokens, held and empty, free."""
    kinds = {"reserved": "full", "doubling": "growing", "padded": "random", "packed": "offloaded"}
    bars = []
    for f in found:
        every = f.num_slots * f.model_steps
        parts = [f.token_steps, f.slot_steps - f.token_steps, every - f.slot_steps]
        bars.append({"variant": kinds.get(f.name, "paged"), "label": f.name, "values": [p / every for p in parts]})
    return {
        "kind": "bars", "title": "What the memory held, mean over model steps", "bars": bars,
        "parts": ["tokens", "held, empty", "free"], "y": {"label": "of all slots", "unit": "%"},
    }  # fmt: skip


def at_once(running: Mapping[str, Sequence[int]], points: int = 30) -> dict:
    """Requests that run at once against the model step. running: name -> their number at each step."""
    kinds = {"reserved": "full", "doubling": "growing", "paged": "paged"}
    series, longest = [], max(map(len, running.values()))
    for name, counts in running.items():
        width = max(1, len(counts) // points)
        means = [sum(counts[i : i + width]) / len(counts[i : i + width]) for i in range(0, len(counts), width)]
        x = [i * width for i in range(len(means))]
        x, means = [*x, len(counts), longest], [*means, 0, 0]  # all have ended
        series.append({"variant": kinds[name.split("-")[0]], "label": name, "points": False, "solid": True,
                       "x": x, "y": means})  # fmt: skip
    return {
        "kind": "lines", "title": "Requests at once in the same memory", "series": series,
        "x": {"label": "model step; 0: all requests have ended", "unit": "steps"},
        "y": {"label": "requests that run", "lo": 0},
    }  # fmt: skip


def block_sizes(sizes: Sequence[int], empty: Sequence[float], tables: Sequence[float], note: str = "") -> dict:
    """Against the block size: the share of held slots that is empty, and the bytes of the block tables."""
    x = {"label": "tokens a block", "unit": "tokens", "scale": "log2"}
    one = {"variant": "paged", "x": list(sizes), "solid": True}
    waste = {
        "kind": "lines", "title": "Waste", "x": x, "y": {"label": "held slots without a token", "unit": "%", "lo": 0},
        "series": [{**one, "label": "empty", "y": list(empty)}],
    }  # fmt: skip
    table = {
        "kind": "lines", "title": "Block tables", "x": x, "y": {"label": "bytes", "unit": "B", "scale": "log2"},
        "series": [{**one, "label": "tables", "y": list(tables)}],
    }  # fmt: skip
    return {"kind": "panels", "title": "The block size", "panels": [waste, table], "size": (9, 3.4), "note": note}
