"""The pictures of eviction: how attention spreads, which tokens are kept; and the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..frontier import Point, undominated
from ..kept import Kept
from . import theme
from .explorer import Explorer, slider


def needed(by_rank: Tensor, share: float) -> Tensor:
    """How many of its heaviest keys draw `share` of a head's attention: by_rank (layers, n_kv, N) -> (layers, n_kv)."""
    return (by_rank.cumsum(-1) < share).sum(-1) + 1


def rank_lines(by_rank: Tensor, note: str = "") -> dict:
    """Attention by rank of the key. by_rank: kvlab.budgets.attention_by_rank()."""
    count, N = needed(by_rank, 0.9), by_rank.shape[-1]
    flat = by_rank.flatten(0, 1)
    order = count.flatten().argsort(stable=True)
    ranks = sorted({round(1.25**i) for i in range(64) if 1.25**i <= N})
    lines = {
        "most even head": (flat[order[-1]], False), "mean of all": (flat.mean(0), True),
        "most pointed head": (flat[order[0]], False),
    }  # fmt: skip
    series = []
    for label, (shares, solid) in lines.items():
        x = [r for r in ranks if shares[r - 1] > 1e-7]  # below it nothing is left to see
        y = [shares[r - 1].item() for r in x]
        series.append({"variant": "heavy_hitter", "label": label, "x": x, "y": y, "points": False, "dashed": not solid,
                       "solid": solid})  # fmt: skip
    half, most = (needed(by_rank.mean((0, 1))[None, None], s).item() for s in (0.5, 0.9))
    return {
        "kind": "lines", "title": "Attention is heavy-tailed", "series": series, "note": note, "size": (7.4, 3.7),
        "x": {"label": "rank of the key, heaviest first", "scale": "log2"},
        "y": {"label": "share of the attention", "unit": "%", "scale": "log10"},
        "sentence": f"Of up to {N:,} keys, the {half} heaviest draw half of the attention and {most} draw 90 %, on "
                    f"average; by head it takes from {int(count.min())} to {int(count.max())} keys to 90 %.",
    }  # fmt: skip


# ---- which tokens are kept ---------------------------------------------------------------------------------------


def kept_maps(kept: Mapping[str, Kept], layer: int, head: int, cells: int = 40) -> dict:
    """Text against time, one panel for each cache: what one head holds after each few tokens."""
    panels, said = [], []
    for name, notes in kept.items():
        values, wide = notes.grid(layer, head, cells)
        n = notes.lengths[-1]
        panels.append({
            "kind": "heatmap", "title": name, "values": values, "rows": [f"{i * wide:,}" for i in range(len(values))],
            "columns": [f"{m:,}" for m in notes.lengths], "label": "share kept", "unit": "%", "lo": 0, "hi": 1,
            "x": {"label": "tokens read"}, "y": {"label": "position of the token"},
        })  # fmt: skip
        held = notes.notes[-1][layer, head]
        old = int(((held >= 0) & (held < n // 2)).sum())
        said.append(f"{name}: {old} of the {int((held >= 0).sum())} tokens held are from the first half of the text")
    return {"kind": "panels", "title": f"Layer {layer}, KV head {head}", "panels": panels, "size": (8.4, 3.7),
            "sentence": f"Layer {layer}, KV head {head}. " + "; ".join(said) + "."}  # fmt: skip


class KeptExplorer(Explorer):
    """Any head of the caches that have been noted: which tokens it holds while the text grows."""

    def __init__(self, kept: Mapping[str, Kept], layer: int = 0, head: int = 0, note: str = "", **kw):
        self.kept, self.at, self.note = dict(kept), (layer, head), note
        super().__init__(**kw)

    def controls(self):
        layers, heads = next(iter(self.kept.values())).notes[-1].shape[:2]
        return {
            "layer": slider("layer", range(layers), self.at[0], "whose tokens are shown"),
            "head": slider("KV head", range(heads), self.at[1], "each keeps tokens of its own choice"),
        }

    def data(self, values: dict) -> dict:
        return {**kept_maps(self.kept, values["layer"], values["head"]), "note": self.note}


# ---- the frontier ------------------------------------------------------------------------------------------------


LEAST = 1e-3  # a loss below 0.1 % is drawn as 0.1 %: the axis is logarithmic, and noise is no less


def loss(point: Point, base: float) -> float:
    """How much of the full cache's perplexity `base` is lost, as it is drawn: 0.5 is half as much again."""
    return max(point.perplexity / base - 1, LEAST)


def frontier(points: Sequence[Point], base: float, title: str, note: str = "", top: float = 20) -> dict:
    """Memory against perplexity: a line for each family, names at its points, and the frontier itself in ink.

    base: the full cache's perplexity. top: the largest loss drawn, in multiples of it. A key of this picture alone,
    "off_scale", lists the Points above it for the caller to name: no drawer reads it.
    """
    best, lines = undominated(points), {}
    shown = [p for p in points if loss(p, base) <= top]
    for p in sorted(shown, key=lambda p: p.nbytes):
        lines.setdefault(p.line, []).append(p)
    ink = [p for p in best if p in shown]
    series = [{"variant": None, "label": "the frontier", "x": [p.nbytes for p in ink],
               "y": [loss(p, base) for p in ink], "points": False, "dashed": True}]  # fmt: skip
    for line, found in lines.items():
        single = len(found) == 1
        series.append({
            "variant": found[0].variant, "label": found[0].title if single else line,
            "x": [p.nbytes for p in found], "y": [loss(p, base) for p in found],
            "names": ["" if single else p.name for p in found], "solid": True,
        })  # fmt: skip
    _say_once(series[1:])
    return {
        "kind": "lines", "title": title, "series": series, "note": note, "size": (9.2, 4.9),
        "x": {"label": "bytes held for the text, fp16 model", "unit": "B", "scale": "log2"},
        "y": {"label": f"perplexity lost (drawn from {theme.number(LEAST, '%')} on)", "unit": "%", "scale": "log10"},
        "off_scale": [p for p in points if p not in shown],
    }  # fmt: skip


def _say_once(series: Sequence[dict]) -> None:
    """Points that nearly coincide and have the same name show it once: two would be printed over each other."""
    said = []
    for s in series:
        for i, (x, y, name) in enumerate(zip(s["x"], s["y"], s["names"], strict=True)):
            if any(name == n and abs(math.log(x / u)) < 0.05 and abs(math.log(y / v)) < 0.3 for u, v, n in said):
                s["names"][i] = ""
            said.append((x, y, name))


def plotly_frontier(data: dict, points: Sequence[Point], base: float):
    """frontier() in plotly; hovering a point gives its bytes, perplexity, KL and agreement."""
    from .interactive import plotly_lines

    at = {(p.nbytes, loss(p, base)): p for p in points}
    figure = plotly_lines(data)
    for trace in figure.data:
        found = [at.get(key) for key in zip(trace.x, trace.y, strict=True)]
        if all(found):
            trace.text = [
                f"<b>{p.title}</b><br>{theme.bytes_(p.nbytes)}<br>perplexity {p.perplexity:.2f}<br>"
                f"KL {p.kl:.4f} nats<br>top-1 {p.top1:.1%}"
                for p in found
            ]
            trace.hovertemplate = "%{text}<extra></extra>"
    return figure
