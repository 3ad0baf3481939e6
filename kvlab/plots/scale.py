"""Axes as numbers: ticks, places, labels that keep their distance. Every way of drawing shares them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from . import theme


@dataclass(frozen=True)
class Scale:
    """One axis from lo to hi. kind: "linear", "log2" or "log10"; unit as in theme.number."""

    lo: float
    hi: float
    kind: str = "linear"
    unit: str = ""

    def at(self, value: float) -> float:
        """Where `value` lies: 0 at lo, 1 at hi. Values outside the axis give places outside 0 to 1."""
        if self.kind == "linear":
            return (value - self.lo) / (self.hi - self.lo)
        return math.log(value / self.lo) / math.log(self.hi / self.lo)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """At most about `most` round values with their labels."""
        if self.kind == "linear":
            unit = 1
            while self.unit == "B" and self.hi / unit >= 1024:  # round in the unit the labels will show
                unit *= 1024
            rough = (self.hi - self.lo) / unit / most
            power = 10.0 ** math.floor(math.log10(rough))
            step = unit * power * min(s for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
            if self.unit not in ("B", "s", "%") and self.hi >= most:
                step = max(1, round(step))
            values = [i * step for i in range(math.ceil(self.lo / step - 1e-9), math.floor(self.hi / step + 1e-9) + 1)]
        else:
            base = 2 if self.kind == "log2" else 10
            first = math.ceil(math.log(self.lo, base) - 1e-9)
            last = math.floor(math.log(self.hi, base) + 1e-9)
            step = max(1, math.ceil((last - first + 1) / most))
            if step > 1 and base == 10:  # decades keep to thousands, where prefixes change
                step = 3 * math.ceil(step / 3) if step > 2 else step
                first = math.ceil(first / step) * step
            values = [float(base) ** p for p in range(first, last + 1, step)]
        return [(v, self.label(v)) for v in values]

    def label(self, value: float) -> str:
        """A tick's text: the prefix stays (bytes keep their unit), the unit itself stands at the axis."""
        if self.unit == "s" and value >= 1:  # 1,000 s: a decade stays recognizable as one
            return f"{theme.count(value)} s"
        if self.unit in ("B", "s", "%"):
            return theme.number(value, self.unit)
        return theme.si(value) if self.unit.startswith("FLOP") or value >= 1e7 else theme.count(value)


def scale_for(values: Sequence[float], axis: dict) -> Scale:
    """The Scale of an axis {"scale", "unit", "lo", "hi"}: around `values`, a margin added; linear axes start at 0."""
    kind, unit = axis.get("scale", "linear"), axis.get("unit", "")
    if kind not in ("linear", "log2", "log10"):
        raise ValueError(f"scale {kind!r} is none of linear, log2, log10")
    values = [v for v in values if v is not None and math.isfinite(v) and (kind == "linear" or v > 0)]
    lo, hi = axis.get("lo"), axis.get("hi")
    if kind == "linear":
        lo = min(0.0, *values, 0.0) if lo is None else lo
        hi = max(values, default=1.0) * 1.06 if hi is None else hi
        return Scale(lo, hi if hi > lo else lo + 1.0, kind, unit)
    lo = min(values, default=1.0) if lo is None else lo
    hi = max(values, default=10.0) if hi is None else hi
    if hi <= lo * 1.01:
        lo, hi = lo / 2, hi * 2
    pad = (hi / lo) ** 0.04
    return Scale(lo if "lo" in axis else lo / pad, hi if "hi" in axis else hi * pad, kind, unit)


def spread(places: Sequence[float], gap: float, lo: float, hi: float) -> list[float]:
    """Label places moved as little as possible (least squares) so that neighbours stand `gap` apart inside lo..hi.

    Where they cannot all fit, the gap shrinks evenly.
    """
    order = sorted(range(len(places)), key=places.__getitem__)
    gap = min(gap, (hi - lo) / max(len(places) - 1, 1))
    # Take i * gap off the i-th label: what is left only has to rise, and pooling neighbours that fall does that best.
    pools = []
    for i, label in enumerate(order):
        pools.append([places[label] - i * gap, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    level = [min(max(value, lo), hi - (len(places) - 1) * gap) for value, n in pools for _ in range(n)]
    out = list(places)
    for i, label in enumerate(order):
        out[label] = level[i] + i * gap
    return out
