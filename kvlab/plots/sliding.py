"""The pictures of sliding windows: quality and recall against the window, what leaves it, who has one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..memory.estimate import estimate, resolve
from . import theme
from .memory import LENGTHS, short

WINDOW = {"label": "keys kept, sinks included", "unit": "keys", "scale": "log2"}
SINKS = {False: "window alone", True: "window and sinks"}


def cap_bars(model: str, texts: int, prompt: int, caps: Sequence[int], free: int, kv_dtype: str = "fp16") -> dict:
    """The cache of `texts` texts for each max_new_tokens, in closed form, under `free` bytes.

    The last token is never fed back, so that a text holds prompt + cap - 1 tokens.
    """
    arch, _, params = resolve(model)
    sizes = [estimate(arch, texts, prompt + n - 1, kv_dtype, params=params).kv_cache_bytes for n in (1, *caps)]
    bars = [{"variant": "full", "label": f"{n:,}", "values": [sizes[0], size - sizes[0]]}
            for n, size in zip(caps, sizes[1:])]  # fmt: skip
    return {
        "kind": "bars", "title": f"{short(model)}, {texts} texts: bytes of the cache by max_new_tokens", "bars": bars,
        "parts": ["prompts", "new tokens, at most"], "y": {"label": "bytes at the end", "unit": "B"},
        "limits": [{"label": f"free: {theme.bytes_(free)}", "value": free}],
    }  # fmt: skip


def held_lines(held: Mapping[str, Sequence[tuple[int, int]]], window: int, title: str, note: str = "") -> dict:
    """Measured bytes against tokens: {cache kind: (tokens, bytes live) after each step}."""
    series = [
        {"variant": kind, "x": [n for n, _ in rows], "y": [b for _, b in rows], "points": False, "solid": True}
        for kind, rows in held.items()
    ]  # fmt: skip
    return {
        "kind": "lines", "title": title, "series": series, "at": window, "note": note,
        "x": {"label": f"tokens of the text (dotted: the window of {window})", "unit": "tokens"},
        "y": {"label": "bytes live, counted", "unit": "B"},
    }  # fmt: skip


def streamed_lines(rows: Sequence[tuple[int, int, int]], one: int, note: str = "") -> dict:
    """An endless stream: (tokens, bytes held, bytes in use) of its cache, beside what keeping all would take."""
    tokens = [n for n, _, _ in rows]
    series = [
        {"variant": "full", "label": "all kept (computed)", "x": tokens, "y": [n * one for n in tokens],
         "points": False, "dashed": True},
        {"variant": "sliding", "label": "held", "x": tokens, "y": [b for _, b, _ in rows], "points": False,
         "solid": True},
        {"variant": None, "label": "of it, in use", "x": tokens, "y": [b for _, _, b in rows], "points": False,
         "dashed": True},
    ]  # fmt: skip
    return {
        "kind": "lines", "title": "An endless text, a bounded cache", "series": series, "note": note,
        "x": {"label": "tokens of the text", "unit": "tokens"}, "y": {"label": "bytes of the cache", "unit": "B"},
    }  # fmt: skip


def share_lines(first: Sequence[float], next_three: Sequence[float], note: str = "") -> dict:
    """Where attention goes, layer by layer: the share that falls on the first token and on the three behind it."""
    layers = list(range(1, len(first) + 1))
    mean = sum(first) / len(first)
    return {
        "kind": "lines", "title": "Attention of queries far into a text", "note": note,
        "series": [
            {"variant": "sliding", "label": "on token 0", "x": layers, "y": list(first), "solid": True},
            {"variant": None, "label": "on tokens 1 to 3", "x": layers, "y": list(next_three), "dashed": True},
        ],
        "x": {"label": "layer", "lo": 0.5},
        "y": {"label": "share of attention, mean of heads", "unit": "%", "lo": 0, "hi": 1},
        "sentence": f"On average {theme.number(mean, '%')} of all attention falls on the very first token.",
    }  # fmt: skip


def _by_sinks(found: Mapping[tuple[int, bool], object], full: object) -> list[dict]:
    """A line with its band for each of "with sinks" and "without", and the full cache's level beside them."""
    series = []
    for sinks, label in SINKS.items():
        keys = sorted(w for w, s in found if s == sinks)
        spreads = [found[w, sinks] for w in keys]
        series.append({"variant": "sliding", "label": label, "x": keys, "y": [s.value for s in spreads],
                       "low": [s.low for s in spreads], "high": [s.high for s in spreads],
                       "dashed": not sinks, "solid": sinks})  # fmt: skip
    keys = sorted({w for w, _ in found})
    series.append({"variant": "full", "label": "full cache", "x": [keys[0], keys[-1]], "y": [full.value] * 2,
                   "points": False})  # fmt: skip
    return series


def perplexity_lines(found: Mapping[tuple[int, bool], object], full: object, title: str = "Perplexity") -> dict:
    """Perplexity against the window. found: (keys kept, with sinks?) -> Spread; full: the Spread of the full cache."""
    series = _by_sinks(found, full)
    return {
        "kind": "lines", "title": title, "series": series, "x": WINDOW,
        "y": {"label": "perplexity (band: 95 %), less is better", "scale": "log2"},
    }  # fmt: skip


def recall_lines(found: Mapping[tuple[int, bool], object], full: object, distance: int, layers: int) -> dict:
    """Recall of a fact `distance` tokens back against the window, with the two windows that matter marked."""
    series = _by_sinks(found, full)
    near, far = distance + 1, -(-distance // layers) + 1  # 1 (W - 1) and layers (W - 1) reach the distance
    marks = [{"label": f"W = {far}: {layers} layers reach it", "value": far},
             {"label": f"W = {near}: one layer does", "value": near}]  # fmt: skip
    return {
        "kind": "lines", "title": f"Recall of a fact {distance} tokens back", "series": series, "x": WINDOW,
        "marks": marks,
        "y": {"label": "probability of the right digit (band: 95 %)", "lo": 0, "hi": 1.19},
    }  # fmt: skip


def heard_map(changes, window: int, title: str, note: str = "") -> dict:
    """kvlab.reach.heard() as layers x distance: log10 of the change; a cell without any change stays empty."""
    rows = changes.tolist()
    names = [str(i) for i in range(1, len(rows))] + ["logits"]
    values = [[math.log10(v) if v > 0 else None for v in row] for row in rows]
    return {
        "kind": "heatmap", "title": title, "values": values[::-1], "rows": names[::-1], "note": note,
        "columns": [str(d) for d in range(len(rows[0]))],
        "x": {"label": "distance from the changed token"}, "y": {"label": "layer (input at the bottom)"},
        "label": "log10 of the change",
    }  # fmt: skip


def patterns(models: Sequence[str], layers: int = 24) -> dict:
    """Which of the first layers keep everything and which a window or a chunk, model by model, from the catalog."""
    rows = []
    for model in models:
        arch, _, _ = resolve(model)
        limited = [_limit(layer) is not None for layer in arch.layers[:layers]]
        cells = [{"text": "W" if w else "all", "group": int(w)} for w in limited]
        limits = sorted({_limit(layer) for layer in arch.layers} - {None})
        name = short(model) + (f": {', '.join(f'{w:,}' for w in limits)}" if limits else "")
        rows.append({"label": name, "cells": cells})
    return {
        "kind": "slots", "title": f"The first {layers} layers and their windows", "rows": rows,
        "groups": ["keeps all", "W: keeps its window (Llama 4: its chunk)"],
    }  # fmt: skip


def pattern_lines(models: Sequence[str], lengths: Sequence[int] = LENGTHS) -> dict:
    """What the windows leave of one text's cache against its length: bytes held / bytes without a window."""
    series = []
    for model in models:
        arch, _, params = resolve(model)
        kept, whole = ([estimate(m, 1, n, params=params).kv_cache_bytes for n in lengths]
                       for m in (arch, resolve(model, windows=False)[0]))  # fmt: skip
        limited = any(_limit(layer) is not None for layer in arch.layers)
        series.append({"variant": "sliding" if limited else "full", "label": short(model), "x": list(lengths),
                       "y": [a / b for a, b in zip(kept, whole)], "points": False, "solid": True})  # fmt: skip
    return {
        "kind": "lines", "title": "What the windows leave of the cache", "series": series,
        "x": {"label": "tokens of the text", "unit": "tokens", "scale": "log2"},
        "y": {"label": "bytes held, of those without a window", "unit": "%", "hi": 1.08},
    }  # fmt: skip


def _limit(layer) -> int | None:
    return getattr(layer, "window", None) or getattr(layer, "chunk", None)
