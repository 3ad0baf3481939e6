"""The explorer of one number: its code, the byte it shares, what comes back. And the grids of fp8 and int codes.

Codes and scales are the cache's own (caches/codecs.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..caches.codecs import CastCodec, make_codec, unpack
from . import theme
from .explorer import Explorer, choice, slider

FORMATS = [("int8", 8), ("int4", 4), ("int2", 2), ("fp8 e4m3", "fp8"), ("fp8 e5m2", "fp8_e5m2")]
NAMES = {16: "full precision", **{bits: name for name, bits in FORMATS}}
SHARED = (-0.62, 0.31, 1.14, -1.35, 0.07, 0.88, -0.24, -0.93, 0.52, -1.08, 0.19, 1.37, -0.41, 0.73, -0.16)


class ByteExplorer(Explorer):
    """One number among others that share its scale: its code, the byte it shares with a neighbour, what comes back.

    The first number is yours; the last one is multiplied, as an outlier channel would be.
    """

    def controls(self):
        values = [round(0.1 * i, 1) for i in range(-20, 21)]
        return {
            "value": slider("your number", values, 0.5, "the first number of the group"),
            "group": slider("group", [2, 4, 8], 8, "numbers that share a scale and a zero point"),
            "outlier": slider("outlier", [1, 2, 4, 8, 16, 32], 1, "the last number of the group, times this"),
            "bits": choice("stored as", FORMATS, 4, "number format"),
        }

    def numbers(self, values: dict) -> Tensor:
        """The group, float64 (group,)."""
        x = torch.tensor([values["value"], *SHARED[: values["group"] - 1]], dtype=torch.float64)
        x[-1] *= values["outlier"]
        return x

    def data(self, values: dict) -> dict:
        x, bits = self.numbers(values), values["bits"]
        codec = make_codec(bits, "token", len(x), max(len(x), 4))
        row = torch.cat((x, x[-1:].expand(max(0, 4 - len(x)))))  # 2-bit codes fill bytes four at a time
        if len(row) > len(x) and not isinstance(codec, CastCodec):
            codec = make_codec(bits, "token", len(row), len(row))
        parts = codec.encode(row.view(1, 1, 1, -1))
        back = codec.decode(*parts, dtype=row.dtype).flatten()[: len(x)]
        stored, words, per_byte, said = self._said(codec, bits, parts, len(x))
        error = back - x
        rows = [("number", [_signed(v) for v in x]), ("code", stored), *([("bits", words)] if words else []),
                ("comes back", [_signed(v) for v in back]), ("error", [_signed(v) for v in error])]  # fmt: skip
        cells = [
            {"label": label, "cells": [{"text": t, "group": i // per_byte, "state": "new" if i == 0 else "held"}
                                       for i, t in enumerate(texts)]}
            for label, texts in rows
        ]  # fmt: skip
        slots = {"kind": "slots", "title": f"Into the byte and back: {NAMES[bits]}", "rows": cells, "weight": 1.9,
                 "states": {"held": "one colour, one byte", "new": "your number"}}  # fmt: skip
        return {"kind": "panels", "title": "One number", "size": (10, 4.2),
                "panels": [slots, self._stairs(values, codec, parts, x)],
                "sentence": f"{said} {_signed(x[0])} comes back as {_signed(back[0])}, off by "
                            f"{theme.digits(abs(error[0].item()))}; the group's root mean square error is "
                            f"{theme.digits(error.square().mean().sqrt().item())}."}  # fmt: skip

    def _said(self, codec, bits, parts, n):
        """Codes and bits of each number as text, numbers in a byte, and the sentence about scale and byte.

        Eight bits do not fit a cell: there are none then, and the sentence has those of your number.
        """
        raw = parts[0].flatten()
        if isinstance(codec, CastCodec):
            exponent = 4 if codec.dtype == torch.float8_e4m3fn else 5
            w = f"{raw[0].item():08b}"
            said = (
                f"No scale: a sign, {exponent} bits of exponent, {7 - exponent} of fraction in a byte of its own. "
                f"0x{raw[0].item():02X} is {w[0]} {w[1 : 1 + exponent]} {w[1 + exponent :]}."
            )
            return [f"0x{c:02X}" for c in raw.tolist()[:n]], [], 1, said
        codes = unpack(parts[0], bits).flatten().tolist()[:n]
        scale, zero = (p.flatten()[0].item() for p in parts[1:])
        many = {1: "one code", 2: "two codes", 4: "four codes"}[8 // bits]
        said = (
            f"Scale {theme.digits(scale)}, zero point {_signed(zero)}: (number - zero point) / scale, rounded, is the "
            f"code, 0 to {2**bits - 1}. The first byte, {many}, is 0x{raw[0].item():02X}."
        )
        return [str(c) for c in codes], [f"{c:0{bits}b}" for c in codes] if bits < 8 else [], 8 // bits, said

    def _stairs(self, values, codec, parts, x) -> dict:
        """What comes back against what goes in, over the group's range."""
        lo, hi = x.min().item(), x.max().item()
        ins = torch.linspace(lo, hi, 385, dtype=torch.float64)
        if isinstance(codec, CastCodec):
            outs = codec.decode(*codec.encode(ins.view(1, 1, 1, -1)), dtype=torch.float64).flatten()
        else:
            scale, zero = (p.flatten()[0].double() for p in parts[1:])
            step = scale if scale > 0 else torch.ones(())
            outs = zero + scale * ((ins - zero) / step).round().clamp(0, 2 ** values["bits"] - 1)
        span = max(hi - lo, 0.1)
        axis = {"lo": min(lo, outs.min().item()) - 0.02 * span, "hi": max(hi, outs.max().item()) + 0.02 * span}
        return {
            "kind": "lines", "title": f"{len(outs.unique())} values come back",
            "x": {"label": "the number", **axis}, "y": {"label": "what comes back", **axis}, "at": values["value"],
            "series": [{"variant": "full", "label": "as it is", "x": [lo, hi], "y": [lo, hi], "points": False},
                       {"variant": "quantized", "label": "rounded", "x": ins.tolist(), "y": outs.tolist(),
                        "points": False, "solid": True}],
        }  # fmt: skip


def _signed(value) -> str:
    return f"{float(value):.2f}".replace("-0.00", "0.00")


def float_grids() -> dict:
    """The numbers that fp8 and 4-bit codes can say: how far apart neighbours are, against their size."""
    series = []
    for label, dtype, dashed in (("e4m3", torch.float8_e4m3fn, False), ("e5m2", torch.float8_e5m2, True)):
        grid = torch.arange(256, dtype=torch.uint8).view(dtype).double()
        grid = grid[grid.isfinite() & (grid > 0)].unique()
        series.append({"variant": "quantized", "label": label, "x": grid[:-1].tolist(), "points": False,
                       "y": grid.diff().tolist(), "dashed": dashed, "solid": not dashed})  # fmt: skip
    lo, hi = series[1]["x"][0], series[1]["x"][-1]
    for bits in (8, 4):
        step = 8 / (2**bits - 1)  # a group from -4 to 4
        series.append({"variant": None, "label": f"int{bits}, -4 to 4", "x": [step, 4.0], "y": [step, step],
                       "points": False})  # fmt: skip
    return {
        "kind": "lines", "title": "How far apart neighbours are", "series": series, "size": (8.6, 4.4),
        "x": {"label": "size of the number", "scale": "log10", "lo": lo, "hi": hi},
        "y": {"label": "distance to the next", "scale": "log10"},
    }  # fmt: skip
