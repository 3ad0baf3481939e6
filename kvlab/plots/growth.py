"""The pictures of what a longer text costs: seconds and FLOPs against length, the two terms, the bandwidth floor."""

from __future__ import annotations

from collections.abc import Sequence

from .. import cost
from ..config import ModelConfig
from ..measure import fit_slope
from . import theme

X = {"label": "tokens", "unit": "tokens", "scale": "log2"}


def time_lines(
    cached: dict[str, list[float]], uncached: tuple[list[int], list[float]], lengths: Sequence[int],
    between: tuple[int, int], note: str = "",
) -> dict:  # fmt: skip
    """Seconds of a whole generation against its length.

    cached: {kind: seconds from the first step up to and including each}; uncached: (lengths, seconds) as sampled and
    integrated, drawn hollow. Slopes are fitted over `between`.
    """
    series = []
    sums = dict(zip(*uncached))
    for kind, y in (
        ("none", [sums[n] for n in lengths]),
        *((k, [s[n - 1] for n in lengths]) for k, s in cached.items()),
    ):
        series.append({"variant": kind, "x": list(lengths), "y": y, "slope": _slope(lengths, y, between),
                       "sampled": [kind == "none"] * len(lengths)})  # fmt: skip
    return {
        "kind": "lines", "title": "Seconds to write a text", "series": series, "note": note,
        "x": {**X, "label": f"tokens written; slopes from {between[0]:,} to {between[1]:,}; hollow: sampled, summed"},
        "y": {"label": "seconds, all steps together", "unit": "s", "scale": "log10"},
    }  # fmt: skip


def flop_lines(config: ModelConfig, window: int, lengths: Sequence[int], between: tuple[int, int], term: str) -> dict:
    """FLOPs of a whole generation from one token, in closed form; term: "total", "projections" or "attention"."""
    names = {"none": "no cache", "full": "all kept", "sliding": f"window {window}"}
    series = []
    for kind, label in names.items():
        y = [getattr(cost.generation_flops(config, kind, 1, n, window), term) for n in lengths]
        series.append({"variant": kind, "label": label, "x": list(lengths), "y": y, "points": False,
                       "slope": _slope(lengths, y, between)})  # fmt: skip
    title = {
        "total": "FLOPs to write a text",
        "projections": "Projections: every row times every weight",
        "attention": "Attention: every row with every key",
    }
    return {
        "kind": "lines", "title": title[term], "series": series,
        "x": {**X, "label": f"tokens written; slopes from {between[0]:,} to {between[1]:,}"},
        "y": {"label": "FLOPs, all steps together", "unit": "FLOP", "scale": "log10"},
    }  # fmt: skip


def step_terms(config: ModelConfig, counted: dict[int, cost.Flops], title: str) -> dict:
    """The two terms of one uncached step against its length, counted, and where they meet."""
    lengths = sorted(counted)
    meet = cost.layer_flops(config) / (4 * config.num_attention_heads * config.head_dim)
    series = [
        {"variant": None, "label": term, "x": lengths, "y": [getattr(counted[n], term) for n in lengths],
         "dashed": term == "attention"}
        for term in ("projections", "attention")
    ]  # fmt: skip
    return {
        "kind": "lines", "title": title, "series": series, "at": meet, "x": {**X, "label": "tokens in view"},
        "y": {"label": "FLOPs of one step without a cache", "unit": "FLOP", "scale": "log10"},
        "sentence": f"In the layers the two terms meet at {theme.digits(meet)} tokens in view, "
        f"{theme.digits(meet / config.hidden_size)} times the hidden size of {config.hidden_size}.",
    }  # fmt: skip


def floor_bars(rows: Sequence[dict], bytes_per_second: float, note: str = "") -> dict:
    """Measured decode steps above their floor: the time it takes to read the weights and the cache once.

    rows: {"label", "weights": bytes, "cache": bytes, "seconds": measured}.
    """
    bars = []
    for row in rows:
        weights, kv = row["weights"] / bytes_per_second, row["cache"] / bytes_per_second
        rest = max(row["seconds"] - weights - kv, 0)
        bars.append({"variant": "full", "label": row["label"], "values": [weights, kv, rest]})
    last = rows[-1]
    share = (last["weights"] + last["cache"]) / bytes_per_second / last["seconds"]
    return {
        "kind": "bars", "title": "One decode step, and what of it is reading", "bars": bars, "note": note,
        "parts": ["reading the weights", "reading keys and values", "everything else"],
        "y": {"label": "seconds per token", "unit": "s"},
        "sentence": f"{last['label']}: reading once, at {bytes_per_second / 1e9:.1f} GB/s, is "
        f"{theme.number(share, '%')} of the measured step.",
    }  # fmt: skip


def width_lines(widths: Sequence[int], seconds: Sequence[float], note: str = "") -> dict:
    """Tokens a second against the number of tokens fed at once: decode is width 1, prefill the rest."""
    speed = [w / s for w, s in zip(widths, seconds)]
    return {
        "kind": "lines", "title": "Tokens a second against tokens fed at once", "note": note,
        "series": [{"variant": "full", "label": "one forward pass", "x": list(widths), "y": speed}],
        "x": {**X, "label": "tokens fed in one pass (1 = decode)"},
        "y": {"label": "tokens a second", "unit": "", "scale": "log2"},
        "sentence": f"Decode: {theme.digits(speed[0])} tokens a second. Prefill of {widths[-1]}: "
        f"{theme.digits(speed[-1])}. The same weights are read once in both.",
    }  # fmt: skip


def passes(prompt: Sequence[str], new: Sequence[str]) -> dict:
    """Which rows each pass without a cache computes: a row of the picture is a pass, a cell a token."""
    words, rows = [*prompt, *new], []
    for i in range(len(new)):
        seen = len(prompt) + i
        first = len(prompt) if i == 0 else 1
        cells = [{"text": repr(words[j].strip(" "))[1:-1] or "·", "group": int(j >= seen - first)} for j in range(seen)]
        rows.append({"label": f"pass {i + 1}", "cells": cells})
    return {
        "kind": "slots", "title": "What each pass computes without a cache", "rows": rows,
        "groups": ["computed again", "computed for the first time"],
    }  # fmt: skip


def _slope(x, y, between) -> float:
    return fit_slope(x, y, between).slope
