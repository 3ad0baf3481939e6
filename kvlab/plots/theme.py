"""The one theme: a colour, a marker and a dash per variant, number formats, and the settings of matplotlib and plotly.

Colour is never the only channel: a variant also has its own marker and dash, and lines carry their names. The first
six, which meet in one picture most often, stay apart under simulated protanopia, deuteranopia and tritanopia;
every line colour has at least 3:1 contrast on white (WCAG 1.4.11) and every text colour 4.5:1 (WCAG 1.4.3).
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

INK, MUTED, GRID, PAPER, ALERT = "#1b1f24", "#57606a", "#e3e6ea", "#ffffff", "#a40e26"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


@dataclass(frozen=True)
class Style:
    """How a variant looks. `marker` is a key of MARKERS; `dash` is on/off lengths in px, () is a solid line."""

    name: str
    color: str
    marker: str = "circle"
    dash: tuple[float, ...] = ()

    @property
    def text(self) -> str:
        """The colour for letters: `color`, darkened until it has 4.5:1 contrast on white."""
        shade, color = 0.0, self.color
        while contrast(color) < 4.5:
            shade += 0.04
            color = mix(self.color, "#000000", shade)
        return color

    def tone(self, part: int) -> str:
        """The fill of the part-th piece of a stacked bar: the colour itself, then lighter tints."""
        return mix(self.color, PAPER, min(0.6 * part, 0.85))


# marker: (matplotlib, plotly, the outline as points around the centre, radius about 1; None is a circle)
MARKERS = {
    "circle": ("o", "circle", None),
    "square": ("s", "square", ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))),
    "up": ("^", "triangle-up", ((0, -1.2), (1.1, 0.8), (-1.1, 0.8))),
    "down": ("v", "triangle-down", ((0, 1.2), (1.1, -0.8), (-1.1, -0.8))),
    "diamond": ("D", "diamond", ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0))),
    "left": ("<", "triangle-left", ((-1.2, 0), (0.8, -1.1), (0.8, 1.1))),
    "right": (">", "triangle-right", ((1.2, 0), (-0.8, -1.1), (-0.8, 1.1))),
    "pentagon": ("p", "pentagon", ((0, -1.2), (1.15, -0.35), (0.7, 1), (-0.7, 1), (-1.15, -0.35))),
}
VARIANTS = {
    "none": Style("no cache", "#a31621", "circle"),
    "growing": Style("growing cache", "#2c6c9c", "up", (7, 3)),
    "full": Style("full cache", "#1d2b80", "square"),
    "sliding": Style("sliding window", "#cc6f00", "diamond"),
    "quantized": Style("quantized", "#b057ea", "down", (9, 3, 2, 3)),
    "paged": Style("paged", "#35a28a", "pentagon", (4, 2)),
    "heavy_hitter": Style("heavy hitters", "#6f6a00", "left", (12, 4)),
    "shared": Style("shared layers", "#c2185b", "right", (2, 2)),
    "offloaded": Style("offloaded", "#5b6f9e", "circle", (1, 3)),
    "random": Style("random eviction", "#8a8a8a", "square", (3, 4)),
    "first_last": Style("first and last", "#7a4a2a", "diamond", (6, 2, 2, 2)),
    "mla": Style("latent (MLA)", "#5a189a", "up", (14, 3, 3, 3)),
}
# Requests, rows and other things that are not variants: told apart by these and by the text in their cells.
GROUPS = ("#8fb8de", "#f0b879", "#9fd3b9", "#dba9c9", "#e3d37a", "#b7b5e4", "#e8a79b", "#b9c4c9")
RAMP = ("#f5f7fb", "#c3d7ec", "#7fb0d8", "#3f7fbd", "#1f4e92", "#0f2350")  # heat maps: light is little, dark is much


def style(variant: str | None, label: str = "") -> Style:
    """The style of a variant by its make_cache name; None gives ink, for a line that is no variant.

    Raises ValueError for an unknown name: a new variant gets its colour here, not in a figure.
    """
    if variant is None:
        return Style(label, INK)
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} has no style; theme.VARIANTS knows {', '.join(VARIANTS)}")
    return VARIANTS[variant]


def slot_fill(state: str, group: int) -> str:
    """The fill of a slot: its group's colour; pale where it is only reserved; paper where nothing lies."""
    color = GROUPS[group % len(GROUPS)]
    if state == "reserved":
        return mix(color, PAPER, 0.68)
    return color if state in ("held", "new", "sink") else PAPER


def rgb(color: str) -> tuple[int, int, int]:
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def mix(a: str, b: str, share: float) -> str:
    """`a` with `share` (0 to 1) of `b` in it."""
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(rgb(a), rgb(b), strict=True))


@lru_cache(256)
def ramp(share: float) -> str:
    """The heat-map colour for 0 (least) to 1 (most)."""
    place = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    i = min(int(place), len(RAMP) - 2)
    return mix(RAMP[i], RAMP[i + 1], place - i)


def contrast(a: str, b: str = PAPER) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""

    def luminance(color):
        c = [v / 255 for v in rgb(color)]
        c = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in c]
        return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]

    hi, lo = sorted((luminance(a), luminance(b)), reverse=True)
    return (hi + 0.05) / (lo + 0.05)


# ---- numbers ---------------------------------------------------------------------------------------------------
def digits(value: float) -> str:
    """Three significant digits, no whole one dropped, thousands separated, no exponent: 0.0312, 1.5, 12, 1,234."""
    if value == 0:
        return "0"
    places = max(2 - math.floor(math.log10(abs(value)) + 1e-12), 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def count(value: float) -> str:
    """A whole number in full (131,072), any other in three digits."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else digits(value)


def bytes_(n: float, exact: bool = False) -> str:
    """Bytes in binary units, as allocators count: 1 KiB = 1,024 B, 1 MiB = 1,024 KiB, 1 GiB = 1,024 MiB.

    exact=True adds the count: '512 MiB (536,870,912 bytes)'.
    """
    value, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 1023.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    text = f"{digits(value)} {units[0]}"
    return f"{text} ({n:,.0f} bytes)" if exact and n >= 1024 else text


def si(value: float, unit: str = "") -> str:
    """A number with an SI prefix (powers of 1,000): '2.1 TFLOP', '15.3 k'; '3×10^25 FLOP' above Z."""
    prefixes, v = ["", "k", "M", "G", "T", "P", "E", "Z"], float(value)
    while abs(v) >= 999.5 and len(prefixes) > 1:
        v, prefixes = v / 1000, prefixes[1:]
    if abs(v) >= 999.5:
        power = math.floor(math.log10(abs(value)))
        return f"{digits(value / 10**power)}×10^{power} {unit}".strip()
    return f"{digits(v)} {prefixes[0]}{unit}".strip()


def seconds(value: float) -> str:
    """Seconds in the unit a person would say: '85 µs', '3.2 ms', '1.25 s', '2 min 5 s', '3 h 20 min', '12 days'."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (0.9995, 1e3, "ms"), (59.95, 1, "s")):
        if abs(value) < limit:
            return f"{digits(value * scale)} {unit}" if value else "0 s"
    if value < 3599.5:
        return f"{round(value) // 60} min {round(value) % 60} s"
    minutes = round(value / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 2880 else f"{digits(value / 86400)} days"


def number(value: float | None, unit: str = "") -> str:
    """`value` in its unit: "B" (bytes), "s", "FLOP" and "FLOP/s" (SI prefixes), "%" (of 1), or a plain count."""
    if value is None:
        return "did not fit"
    if unit == "B":
        return bytes_(value)
    if unit == "s":
        return seconds(value)
    if unit == "%":
        return f"{digits(100 * value)} %"
    if unit.startswith("FLOP") or unit == "SI":
        return si(value, "" if unit == "SI" else unit)
    return f"{count(value)} {unit}".strip()


# ---- matplotlib and plotly -------------------------------------------------------------------------------------
RC = {
    "figure.facecolor": PAPER, "savefig.facecolor": PAPER, "axes.facecolor": PAPER, "text.color": INK,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10.5,
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.titlesize": 12, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 12, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "lines.linewidth": 2.2, "lines.markersize": 5.5, "legend.frameon": False,
}  # fmt: skip


@contextmanager
def matplotlib_theme():
    """The theme for the figures made inside the `with`; matplotlib's own settings come back afterwards."""
    import matplotlib

    with matplotlib.rc_context(RC):
        yield


_AXIS = {"gridcolor": GRID, "linecolor": MUTED, "zeroline": False, "ticks": "outside", "title": {"standoff": 10}}
PLOTLY = {
    "layout": {
        "paper_bgcolor": PAPER, "plot_bgcolor": PAPER, "font": {"color": INK, "family": FONT, "size": 14},
        "title": {"x": 0.01, "xanchor": "left", "font": {"size": 17}}, "hoverlabel": {"bgcolor": PAPER},
        "colorway": [s.color for s in VARIANTS.values()], "xaxis": _AXIS, "yaxis": _AXIS,
        "margin": {"l": 80, "r": 150, "t": 60, "b": 80},
    }
}  # fmt: skip
