"""Notebook 05's pictures: errors by channel, bytes, quality against memory, and how the error grows.

What is measured comes from kvlab.rounding and kvlab.quality.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .. import rounding
from ..config import ModelConfig
from . import theme
from .byte import FORMATS, NAMES
from .evicting import LEAST
from .explorer import Explorer, choice, slider

AXES = {"token": "per token", "channel": "per channel"}


# ---- channels ----------------------------------------------------------------------------------------------------


class ChannelExplorer(Explorer):
    """One head's keys or values as they are, and the error of rounding them with scales per token and per channel.

    keys, values: (layers, n_kv, S, D), S at least a group of 64; see kvlab.rounding.keys_values. About 16 tokens are
    drawn; the figures in the sentence are those of all.
    """

    def __init__(self, keys: Tensor, values: Tensor, layer: int = 0, head: int = 0, note: str = "", **kw):
        self.stored = {"keys": keys.float().cpu(), "values": values.float().cpu()}
        self.at, self.note = (layer, head), note
        super().__init__(**kw)

    def controls(self):
        layers, heads = self.stored["keys"].shape[:2]
        return {
            "layer": slider("layer", range(layers), self.at[0], "whose keys or values"),
            "head": slider("head", range(heads), self.at[1], "KV head of that layer"),
            "bits": choice("stored as", FORMATS[:3], 4, "number format; groups of 64"),
            "what": choice("what", ["keys", "values"], "keys", "what is rounded"),
        }

    def data(self, values: dict) -> dict:
        x = self.stored[values["what"]][values["layer"], values["head"]]
        bits, panels, lost = values["bits"], [], {}
        errors = {axis: rounding.rounded(x[None], bits, axis)[0] for axis in AXES}
        kept = min(len(e) for e in errors.values())
        errors = {axis: (e[:kept] - x[:kept]).abs() for axis, e in errors.items()}
        top = max(e.max().item() for e in errors.values())
        what = f"|{values['what'][:-1]}|"
        panels.append(_by_token(x[:kept].abs(), what, what, "token"))
        for axis, e in errors.items():
            lost[axis] = (e.square().mean() / x[:kept].square().mean()).sqrt().item()
            panels.append(_by_token(e, f"int{bits} error, {AXES[axis]}", "error", "", top))
        size = x[:kept].abs().mean(0)
        outlier = int(size.argmax())
        sentence = (
            f"Layer {values['layer']}, head {values['head']}, int{bits}: channel {outlier} is "
            f"{theme.digits(size[outlier].item() / size.median().item())} times the median channel. Error, of the "
            f"{values['what']}' own size: {100 * lost['token']:.1f} % with scales per token, "
            f"{100 * lost['channel']:.1f} % per channel."
        )
        return {
            "kind": "panels", "title": "Channels", "panels": panels, "sentence": sentence, "note": self.note,
            "size": (9.6, 3.9),
        }  # fmt: skip


def _by_token(x: Tensor, title: str, label: str, y: str, hi: float | None = None) -> dict:
    """A heat map of about 16 rows of x (S, D)."""
    rows = range(0, x.shape[0], max(1, x.shape[0] // 16))
    return {
        "kind": "heatmap", "title": title, "values": [[round(v, 4) for v in x[r].tolist()] for r in rows],
        "rows": [str(r) for r in rows], "columns": [str(c) for c in range(x.shape[1])], "label": label,
        "x": {"label": "channel"}, "y": {"label": y}, **({"hi": hi} if hi else {}),
    }  # fmt: skip


def outlier_map(keys: Tensor, note: str = "", what: str = "keys") -> dict:
    """Every head's channels: mean size, in multiples of the head's median channel. keys (layers, n_kv, S, D)."""
    found = rounding.outliers(keys.float())
    layers, heads, _ = found.shape
    largest = found.flatten(0, 1).amax(-1)
    return {
        "kind": "heatmap", "title": f"{what[0].upper()}{what[1:]}: how much larger than the head's median channel",
        "values": [[round(v, 2) for v in row] for row in found.flatten(0, 1).tolist()],
        "rows": [f"layer {i}" if h == 0 else "" for i in range(layers) for h in range(heads)],
        "columns": [str(c) for c in range(keys.shape[-1])], "label": "times the median",
        "note": note, "size": (7.8, 4.4),
        "lo": 0, "hi": 12, "x": {"label": "channel"}, "y": {"label": f"{layers * heads} KV heads"},
        "sentence": f"The largest channel of a head is {theme.digits(largest.median().item())} times its median "
                    f"channel (median over heads), at most {theme.digits(largest.max().item())} times.",
    }  # fmt: skip


# ---- bytes -------------------------------------------------------------------------------------------------------


def byte_bars(config: ModelConfig, tokens: int, rows: Sequence[tuple[str, dict]], note: str = "") -> dict:
    """Bytes held for one sequence, model in fp16: codes, scales, tail. rows: (label, options of rounding.held)."""
    full, bars = config.kv_bytes_per_token(2) * tokens, []
    bars.append({"variant": "full", "label": "fp16", "values": [full, 0, 0]})
    for label, options in rows:
        bars.append(
            {"variant": "quantized", "label": label, "values": list(rounding.held(config, tokens, **options).values())}
        )
    saved = [_saving(label, full / sum(b["values"])) for (label, _), b in zip(rows, bars[1:])]
    return {
        "kind": "bars", "title": f"{tokens:,} tokens", "y": {"label": "bytes held, fp16 model", "unit": "B"},
        "parts": ["codes", "scales and zero points", "tail in fp16"], "bars": bars, "note": note,
        "sentence": "; ".join(saved) + ".",
    }  # fmt: skip


def _saving(label: str, times: float) -> str:
    return f"{label} saves {times:.2f}x" if times > 1 else f"{label} saves nothing: {1 / times:.2f}x as many bytes"


class BytesExplorer(Explorer):
    """What a quantized cache holds: codes, scales, tail. How much int4 saves depends on all the sliders."""

    def __init__(self, config: ModelConfig, name: str = "", **kw):
        self.config, self.name = config, name
        super().__init__(**kw)

    def controls(self):
        return {
            "tokens": slider("length", [2**p for p in range(7, 16)], 1024, "tokens of the sequence", "tokens"),
            "group": slider("group", [16, 32, 64, 128], 64, "numbers that share a scale and a zero point"),
            "residual": slider("residual", [0, 32, 64, 128], 64, "newest tokens that stay in fp16 at least", "tokens"),
            "axis": choice("keys", [(n, a) for a, n in AXES.items()], "channel", "what the scales of keys belong to"),
        }

    def data(self, values: dict) -> dict:
        options = {"axis": values["axis"], "group": values["group"], "residual": values["residual"]}
        rows = [(NAMES[b], {"bits": b, **options}) for b in (8, "fp8", 4, 2)]
        data = byte_bars(self.config, values["tokens"], rows)
        data["title"] = f"{self.name}: {data['title']}".removeprefix(": ")
        return data


# ---- quality -----------------------------------------------------------------------------------------------------


def frontier(points: Sequence[tuple[str, str, int, float, float]], title: str, note: str = "") -> dict:
    """Memory against perplexity, and against KL. points: (line, name of the point, bytes, perplexity, KL in nats).

    The points of a line are joined. "full" is the full cache: its perplexity is what the others lose against, and its
    bytes are in the sentence.
    """
    (whole, base), *_ = [p[2:4] for p in points if p[0] == "full"]
    lines: dict[str, list] = {}
    for line, name, *point in sorted(points, key=lambda p: p[2]):
        if line != "full":
            lines.setdefault(line, []).append((name, *point))

    def series(y):
        for line, found in lines.items():
            single = len(found) == 1
            yield {
                "variant": "quantized", "x": [p[1] for p in found], "y": [y(p) for p in found],
                "label": f"{line} {found[0][0]}".strip() if single else line,
                "names": ["" if single else p[0] for p in found],
                "dashed": line == "per token", "solid": line != "per token",
            }  # fmt: skip

    x = {"label": "bytes held, fp16 model", "unit": "B", "lo": 0}
    lost = {"label": f"perplexity lost, at least {theme.number(LEAST, '%')}", "unit": "%", "scale": "log10"}
    panels = [
        {"kind": "lines", "title": title, "x": x, "y": lost,
         "series": list(series(lambda p: max(p[2] / base - 1, LEAST)))},
        {"kind": "lines", "title": "How far from the full cache", "x": x,
         "y": {"label": "KL divergence, nats", "scale": "log10"}, "series": list(series(lambda p: max(p[3], 1e-9)))},
    ]  # fmt: skip
    return {
        "kind": "panels", "title": title, "note": note, "panels": panels, "size": (9.6, 3.9),
        "sentence": f"The full cache: {theme.bytes_(whole)}, perplexity {theme.digits(base)}.",
    }  # fmt: skip


def error_growth(by_layer: Mapping[str, Tensor], block: int = 64, note: str = "") -> dict:
    """Error of the hidden states over layers and along the text. by_layer: {name: (layers, N)}, of error_by_layer().

    Over layers: root mean square over the tokens past the first block (the first sees nothing rounded). Over the text:
    the last layer, mean of each block.
    """
    layers, text = [], []
    for name, e in by_layer.items():
        deep = e[:, block:].square().mean(1).sqrt()
        layers.append(_error_line(name, list(range(1, len(deep) + 1)), deep.tolist()))
        parts = e[-1].split(block)
        middles = [i * block + len(p) // 2 for i, p in enumerate(parts)]
        means = [p.square().mean().sqrt().item() for p in parts]
        rounded = [(x, y) for x, y in zip(middles, means, strict=True) if y > 1e-5]  # the first blocks see no codes
        text.append(_error_line(name, *zip(*rounded, strict=True)))
    y = {"label": "error, share of the state's size", "unit": "%", "scale": "log10"}
    depth, place = {"label": "layer", "lo": 0}, {"label": "position", "unit": "tokens", "lo": 0}
    panels = [
        {"kind": "lines", "title": "From layer to layer", "x": depth, "y": y, "series": layers},
        {"kind": "lines", "title": "Along the text, last layer", "x": place, "y": y, "series": text},
    ]
    return {"kind": "panels", "title": "Growth", "note": note, "panels": panels, "size": (9.6, 3.9)}


def _error_line(name, x, y) -> dict:
    return {"variant": "quantized", "label": name, "x": list(x), "y": list(y), "points": False,
            "dashed": "token" in name, "solid": "token" not in name}  # fmt: skip
