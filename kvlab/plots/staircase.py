"""The staircase and the saw-tooth: what a cache allocates over a generation, and the explorer of it."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import ModelConfig
from ..exercise_list import llama_3b, llama_7b, smollm2
from ..staircase import Height, heights
from . import theme
from .explorer import Explorer, choice, slider

TOY = ModelConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, head_dim=64,
                  vocab_size=64)  # fmt: skip
SHAPES = {
    "toy": ("4 layers", lambda: TOY),
    "smollm2": ("SmolLM2-135M", smollm2),
    "llama-3b": ("Llama-3.2-3B", llama_3b),
    "llama-7b": ("LLaMA-7B", llama_7b),
}
X = {"label": "tokens held", "unit": "tokens"}


def teeth(rows: Sequence[Height]) -> tuple[list[float], list[int]]:
    """The corners of a saw: between two tokens up to the peak of the step, then down to what it leaves."""
    x, y = [rows[0].tokens], [rows[0].held]
    for before, row in zip(rows, rows[1:]):
        x += [row.tokens - 0.6, row.tokens - 0.5, row.tokens - 0.4]
        y += [before.held, row.peak, row.held]
    return x + [rows[-1].tokens], y + [rows[-1].held]


def stairs(tokens: Sequence[int], held: Sequence[int]) -> tuple[list[float], list[int]]:
    """Flat until the next token, then straight up."""
    x, y = [tokens[0]], [held[0]]
    for n, before, now in zip(tokens[1:], held, held[1:]):
        x += [n - 0.5, n - 0.5]
        y += [before, now]
    return x + [tokens[-1]], y + [held[-1]]


def measured(rows: dict[str, Sequence[Height]], used: Sequence[int] = (), note: str = "", labels: dict | None = None):
    """Measured generations, one saw for each kind; used: bytes in use of a paged cache after each of the passes."""
    series = []
    for kind, heights_ in rows.items():
        x, y = teeth(heights_)
        series.append({"variant": kind, "x": x, "y": y, "points": False, "solid": True,
                       **({"label": labels[kind]} if labels else {})})  # fmt: skip
    if used:
        tokens = [h.tokens for h in next(iter(rows.values()))]
        x, y = stairs(tokens, used)
        series.append(
            {"variant": "paged", "label": "paged,\nblocks in use", "x": x, "y": y, "points": False, "solid": True}
        )
    return {
        "kind": "lines", "title": "Bytes live while a text is written", "series": series, "note": note,
        "x": {**X, "lo": min(s["x"][0] for s in series)},
        "y": {"label": "bytes beside the weights", "unit": "B", "hi": 1.15 * max(max(s["y"]) for s in series)},
    }  # fmt: skip


def events(live: Sequence[int], title: str, note: str = "", segments: Sequence[int] = ()) -> dict:
    """Bytes live after each allocation and each freeing, in order; segments: the allocator's, where it was asked."""
    x, y = stairs(list(range(len(live))), live)
    series = [{"variant": "growing", "label": "tensors", "x": x, "y": y, "points": False, "solid": True}]
    if segments:
        sx, sy = stairs(list(range(len(segments))), segments)
        series.append({"variant": None, "label": "segments", "x": sx, "y": sy, "points": False, "dashed": True})
    return {
        "kind": "lines", "title": title, "series": series, "note": note, "x": {"label": "allocations and freeings"},
        "y": {"label": "bytes, from the start of the step", "unit": "B"},
    }  # fmt: skip


def reserved(played: dict[str, Sequence[tuple[int, int, int, int]]], title: str) -> dict:
    """Rows of caching_allocator.replay() for each kind: what tensors asked for and what the allocator keeps."""
    series, last = [], max(rows[-1][0] for rows in played.values())
    for kind, rows in played.items():
        name, rows = theme.style(kind).name, [*rows, (last, *rows[-1][1:])]
        for at, words in ((3, "reserved"), (1, "asked for")):
            series.append({"variant": kind, "label": f"{name},\n{words}", "x": [r[0] for r in rows],
                           "y": [r[at] for r in rows], "points": False, "dashed": at == 1, "solid": True})  # fmt: skip
    return {
        "kind": "lines", "title": title, "series": series, "x": X, "y": {"label": "bytes", "unit": "B"},
        "note": "Simulated: the allocator's rule, played with the allocations of the cache.",
    }  # fmt: skip


def moments(rows: dict[str, tuple[int, int]], title: str) -> dict:
    """Bars of (bytes kept, bytes for a moment)."""
    return {
        "kind": "bars", "title": title, "parts": ["keys and values", "for a moment"],
        "bars": [{"variant": "full", "label": n, "values": list(v)} for n, v in rows.items()],
        "y": {"label": "bytes beside the weights", "unit": "B"},
    }  # fmt: skip


class StaircaseExplorer(Explorer):
    """What each cache holds while a text grows (fp16), in closed form: kvlab.staircase, tested on the real caches.

    Left: the last tokens of the text, every tooth and every stair. Right: what is held at the end, and what more for a
    moment.
    """

    variants = ("growing", "full", "sliding", "paged")

    def controls(self):
        return {
            "length": slider("length", [2**p for p in range(6, 16)], 64, "tokens at the end of the text", "tokens"),
            "shown": slider("look at the last", [16, 32, 64, 256, 1024], 64, "tokens in the left picture", "tokens"),
            "batch": slider("batch", [1, 2, 4, 8, 16, 32], 1, "texts written at once"),
            "window": slider("window", [2**p for p in range(4, 13)], 32, "slots of the sliding cache", "tokens"),
            "block": slider("block", [8, 16, 32, 64, 128], 16, "tokens in a block of the paged cache", "tokens"),
            "model": choice("model", [(name, key) for key, (name, _) in SHAPES.items()], "toy", "whose shape"),
            "variant": choice("show", [("all four", "all"), *((theme.style(v).name, v) for v in self.variants)], "all",
                              "which caches the left picture shows"),
        }  # fmt: skip

    def data(self, values: dict) -> dict:
        (name, shape), length, batch = SHAPES[values["model"]], values["length"], values["batch"]
        config, first = shape(), max(1, length - values["shown"])
        options = {"window": values["window"], "block_size": values["block"], "batch_size": batch}
        count = length - first + 1
        tokens = (
            sorted({first + i * (count - 1) // 128 for i in range(129)}) if count > 128 else range(first, length + 1)
        )
        series, bars = [], []
        for kind in self.variants:
            rows = heights(kind, config, list(tokens), length, **options)
            end = rows[-1]
            bars.append({"variant": kind, "values": [end.held, end.peak - end.held]})
            if values["variant"] not in ("all", kind):
                continue
            if count > 128:  # too many teeth to draw: their upper ends as a band
                line = {"x": [r.tokens for r in rows], "y": [r.held for r in rows], "low": [r.held for r in rows],
                        "high": [r.peak for r in rows]}  # fmt: skip
            else:
                x, y = stairs([r.tokens for r in rows], [r.held for r in rows]) if kind == "paged" else teeth(rows)
                line = {"x": x, "y": y}
            series.append({"variant": kind, "points": False, "solid": kind == "growing", **line})
        lines = {
            "kind": "lines", "title": f"{name}: the last {count - 1} of {length:,} tokens", "series": series,
            "x": {**X, "lo": first, "hi": length}, "weight": 1.3,
            "y": {"label": "bytes of the cache, fp16", "unit": "B"},
        }  # fmt: skip
        held = {
            "kind": "bars", "title": f"At {length:,} tokens, batch {batch}", "parts": ["held", "more, for a moment"],
            "bars": bars, "y": {"label": "bytes", "unit": "B"},
        }  # fmt: skip
        grow = heights("growing", config, [length], length, **options)[0]
        block = theme.bytes_(values["block"] * config.kv_bytes_per_token())
        sentence = (
            f"To add one token, a growing cache needs {theme.bytes_(grow.peak - grow.held)} more for a moment: one of "
            f"{config.num_hidden_layers} layers is there twice. A paged one takes a block of {block} for each text "
            f"every {values['block']} tokens."
        )
        return {"kind": "panels", "title": "The staircase", "panels": [lines, held], "sentence": sentence}
