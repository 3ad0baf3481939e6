"""The same pictures in matplotlib, for what stands still: saved notebooks, the README, slides.

draw(data) takes the dict that data.py describes and returns a Picture: a matplotlib Figure that displays itself as a
small PNG with alt text. It is made without pyplot, so nothing is drawn twice and no global state is touched.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap

from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from . import data as pictures
from . import spans, theme
from .scale import Scale, scale_for, spread

_HALO = [withStroke(linewidth=3, foreground=theme.PAPER)]  # words stay readable across a line
DPI, SHOWN = 105, 72  # more dots an inch than shown: sharp when enlarged; a dozen pictures fit a notebook of 300 KiB


class Picture(Figure):
    """A Figure that knows its words: `.alt` (the picture in numbers) and `.sentence` (what it says, may be empty)."""

    data: dict = {}

    @property
    def sentence(self) -> str:
        return self.data.get("sentence", "")

    @property
    def alt(self) -> str:
        return f"{pictures.describe(self.data)} {self.sentence}".strip()

    def png(self) -> bytes:
        """The picture as a PNG of a few colours: a quarter of the bytes, and the theme's colours exact."""
        from PIL import Image

        raw, small = io.BytesIO(), io.BytesIO()
        self.savefig(raw, format="png", dpi=DPI)
        image = Image.open(raw).convert("RGB")
        panels = [p for column in pictures.columns(self.data) for p in column] if "panels" in self.data else [self.data]
        heat = any(p.get("kind") == "heatmap" for p in panels)  # its ramp has 32 colours of its own
        image = _few_colors(image, 72 if heat else 40)
        image.save(small, "png", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, include=None, exclude=None):
        wide, tall = self.get_size_inches()
        size = {"width": round(wide * SHOWN), "height": round(tall * SHOWN), "alt": self.alt}
        return (
            {"image/png": base64.b64encode(self.png()).decode(), "text/plain": self.alt},
            {"image/png": size, "alt": self.alt},
        )


def _few_colors(image, most: int = 40):
    """The image in its most frequent colours, the others as the nearest of these. (A median cut mixes thin lines.)"""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image).astype(np.int32) @ (1 << 16, 1 << 8, 1)
    found, where, times = np.unique(pixels, return_inverse=True, return_counts=True)
    rgb = np.stack((found >> 16, found >> 8 & 255, found & 255), 1)
    palette = rgb[np.argsort(-times)[:most]]
    nearest = ((rgb[:, None] - palette) ** 2).sum(2).argmin(1).astype(np.uint8)
    small = Image.fromarray(nearest[where].reshape(pixels.shape))
    small.putpalette(palette.astype(np.uint8).tobytes())
    return small


def draw(data: dict, size: tuple[float, float] | None = None) -> Picture:
    """The picture, `size` inches wide and high (default: the data's own, else by kind).

    Raises ValueError for data it cannot draw (see data.py).
    """
    kind = pictures.check(data)
    columns = pictures.columns(data) if kind == "panels" else [[data]]
    panels = [panel for column in columns for panel in column]
    with theme.matplotlib_theme():
        figure = Picture(
            figsize=size or data.get("size") or ((12.5, 5.4) if kind == "panels" else (9.6, _height(data))),
            layout="constrained",
        )
        figure.data = data
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        grid = figure.add_gridspec(1, len(columns), width_ratios=[c[0].get("weight", 1) for c in columns])
        for place, column in zip(grid, columns, strict=True):
            cells = place.subgridspec(len(column), 1, height_ratios=pictures.talls(column))
            for cell, panel in zip(cells, column, strict=True):
                ax = figure.add_subplot(cell)
                _DRAW[panel["kind"]](ax, panel)
                ax.set_title(panel["title"], pad=30 if len(panel.get("parts", ())) > 1 else 12)
        notes = [data.get("sentence"), *dict.fromkeys(p["note"] for p in (data, *panels) if p.get("note"))]
        if any(notes):
            words = "\n".join(textwrap.fill(n, int(12.3 * figure.get_size_inches()[0])) for n in notes if n)
            figure.supxlabel(words, x=0.012, ha="left", fontsize=10.5, color=theme.INK)
    return figure


def _height(data: dict) -> float:
    if data["kind"] == "bars":
        return 2.0 + 0.55 * len(data["bars"])
    if data["kind"] == "slots":
        return 1.3 + 0.55 * len(data["rows"])
    return 5.2


def _ticks(axis, scale: Scale, most: int) -> None:
    ticks = scale.ticks(most)
    axis.set_ticks([v for v, _ in ticks], [t for _, t in ticks])
    axis.set_ticks([], minor=True)


def _lines(ax, data: dict) -> None:
    series, limits, marks = data["series"], data.get("limits", ()), data.get("marks", ())
    xs = scale_for([v for s in series for v in s["x"]] + [m["value"] for m in marks], data["x"])
    seen = [v for s in series for key in ("y", "low", "high") for v in s.get(key, ())]
    ys = scale_for(seen + [m["value"] for m in limits], data["y"])
    for which, scale in (("x", xs), ("y", ys)):
        if scale.kind != "linear":
            getattr(ax, f"set_{which}scale")("log", base=2 if scale.kind == "log2" else 10)
    ax.set_xlim(xs.lo, xs.hi)
    ax.set_ylim(ys.lo, ys.hi)
    _ticks(ax.xaxis, xs, 6)
    _ticks(ax.yaxis, ys, 6)
    ax.grid(axis="x", visible=False)
    ax.set_xlabel(data["x"].get("label", ""))
    ax.set_ylabel(data["y"].get("label", ""))
    for m in limits:
        ax.axhspan(m["value"], ys.hi, color=theme.ALERT, alpha=0.06, lw=0)
        ax.axhline(m["value"], color=theme.ALERT, lw=1.4, ls=(0, (5, 3)))
        ax.annotate(m["label"], (xs.lo, m["value"]), (5, 4), textcoords="offset points", color=theme.ALERT)
    for i, m in enumerate(marks):
        left = xs.at(m["value"]) < 0.6  # words stand on the side that has more room
        ax.axvline(m["value"], color=theme.MUTED, lw=1.2, ls=(0, (5, 3)), zorder=1)
        ax.annotate(m["label"], (m["value"], 1), (5 if left else -5, -4 - 14 * i), xycoords=("data", "axes fraction"),
                    textcoords="offset points", va="top", ha="left" if left else "right", color=theme.MUTED,
                    path_effects=_HALO)  # fmt: skip
    if data.get("at") is not None:
        ax.axvline(data["at"], color=theme.INK, lw=1, ls=(0, (2, 3)))
    ends = []
    for s in series:
        look, done = theme.style(s.get("variant")), pictures.finished(s)
        shape, dash = theme.MARKERS[look.marker][0], pictures.dash(s, look.dash)
        if "low" in s:
            ax.fill_between(s["x"], s["low"], s["high"], color=look.color, alpha=0.15, lw=0)
        ax.plot([x for x, _, _ in done], [y for _, y, _ in done], color=look.color, label=pictures.name(s),
                ls=(0, tuple(d / 2 for d in dash)) if dash else "-")  # fmt: skip
        shown = done if s.get("points", True) else []
        if data.get("at") is not None and done and not shown:
            shown = [min(done, key=lambda p: abs(p[0] - data["at"]))]
        for hollow in (False, True):
            some = [(x, y) for x, y, sampled in shown if sampled == hollow]
            if some:
                ax.scatter(*zip(*some, strict=True), s=34, marker=shape, zorder=3, linewidths=1.6,
                           facecolors=theme.PAPER if hollow else look.color, edgecolors=look.color)  # fmt: skip
        for x in pictures.unfinished(s):
            ax.plot(
                [x], [0.99], "x", color=look.color, ms=8, mew=2.4, clip_on=False, transform=ax.get_xaxis_transform()
            )
        for x, y, words in zip(s["x"], s["y"], s.get("names", ()), strict=False):
            if y is not None and words:
                ax.annotate(words, (x, y), (6, 5), textcoords="offset points", color=look.text, fontsize=9.5,
                            path_effects=_HALO, zorder=4)  # fmt: skip
        ends.append((done[-1][0], ys.at(done[-1][1])) if done else (xs.hi, 1.0))
    places = spread([y for _, y in ends], 0.05 * pictures.label_rows(series), 0, 1)
    for s, (x, y), place in zip(series, ends, places, strict=True):
        look, ((first, *rest), slope) = theme.style(s.get("variant")), pictures.label(s)
        end = {"xycoords": "axes fraction", "annotation_clip": False}
        ax.annotate(first, (xs.at(x), y), (1.025, place), va="center", textcoords="axes fraction", color=look.text,
                    arrowprops={"arrowstyle": "-", "color": look.color, "lw": 0.8, "relpos": (0, 0.5),
                                "ls": "-" if xs.at(x) > 0.9 else (0, (1, 3))},  # a long one must not look like data
                    fontweight="bold", **end)  # fmt: skip
        for i, words in enumerate((*rest, slope), 1):
            bold = (
                {"color": look.text, "fontweight": "bold"}
                if i <= len(rest)
                else {"color": theme.MUTED, "fontsize": 9.5}
            )
            ax.annotate(words, (1.025, place), (0, -13 * i), va="center", textcoords="offset points", **bold, **end)


def _bars(ax, data: dict) -> None:
    bars, limits, unit = data["bars"], data.get("limits", ()), data["y"].get("unit", "")
    totals = [None if b["values"] is None else sum(b["values"]) for b in bars]
    xs = scale_for(totals + [m["value"] for m in limits], data["y"])
    for i, (b, total) in enumerate(zip(bars, totals, strict=True)):
        look, left = theme.style(b.get("variant")), 0.0
        for part, value in enumerate(b["values"] or ()):
            ax.barh(i, value, 0.64, left, color=look.tone(part), edgecolor=look.color, linewidth=0.8)
            left += value
        if total is None:
            ax.plot([xs.hi * 0.015], [i], "x", color=look.color, ms=8, mew=2.4)
        words, *parts = pictures.bar_words(b["values"], unit).split("\n")
        at = (left if total is not None else xs.hi * 0.03, i)
        ax.annotate("".join(parts), at, (6, -9), color=theme.MUTED, fontsize=9, textcoords="offset points", va="center",
                    annotation_clip=False, path_effects=_HALO)  # fmt: skip
        ax.annotate(words, at, (6, 4 if parts else 0),
                    textcoords="offset points", va="center", annotation_clip=False, path_effects=_HALO)  # fmt: skip
    for part, label in enumerate(data["parts"] if len(data["parts"]) > 1 else ()):
        ax.bar(
            [0],
            [0],
            0,  # no width: a key to the legend, not a bar
            color=theme.mix(theme.MUTED, theme.PAPER, min(0.6 * part, 0.85)),
            edgecolor=theme.MUTED,
            label=label,
        )
    if len(data["parts"]) > 1:
        ax.legend(
            loc="upper left",
            bbox_to_anchor=(-0.02, 1.0),
            borderaxespad=-1.9,
            handlelength=1.2,
            ncols=len(data["parts"]),
            fontsize=9.5,
        )
    ax.set_xlim(xs.lo, xs.hi)
    ax.set_ylim(len(bars) - 0.5, -0.5 - (0.3 if len(data["parts"]) > 1 else 0))
    _ticks(ax.xaxis, xs, 4)
    ax.set_yticks(range(len(bars)), [pictures.name(b) for b in bars])
    for tick, b in zip(ax.get_yticklabels(), bars, strict=True):
        tick.set(color=theme.style(b.get("variant")).text, fontweight="bold")
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(data["y"].get("label", ""))
    for m in limits:
        ax.axvline(m["value"], color=theme.ALERT, lw=1.4, ls=(0, (5, 3)))
        ax.annotate(m["label"], (m["value"], 1), (-5, -4), xycoords=("data", "axes fraction"), va="top", ha="right",
                    textcoords="offset points", color=theme.ALERT)  # fmt: skip


def _heatmap(ax, data: dict) -> None:
    lo, hi = pictures.heat_range(data)
    values = [[math.nan if v is None else v for v in row] for row in data["values"]] or [[math.nan]]
    ramp = LinearSegmentedColormap.from_list("kvlab", theme.RAMP, N=32)
    image = ax.imshow(values, cmap=ramp, vmin=lo, vmax=hi, aspect="auto", interpolation="nearest")
    wide = max(6, round(1.9 * _inches(ax)))
    for axis, names, most in ((ax.xaxis, data.get("columns", ()), wide), (ax.yaxis, data.get("rows", ()), 16)):
        every = max(1, -(-len(names) // most))
        axis.set_ticks(range(0, len(names), every), [str(n) for n in names[::every]])
    ax.grid(visible=False)
    ax.set_xlabel(data.get("x", {}).get("label", ""))
    ax.set_ylabel(data.get("y", {}).get("label", ""))
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02, label=data.get("label", ""))
    bar.outline.set_visible(False)
    _ticks(bar.ax.yaxis, Scale(lo, hi, "linear", data.get("unit", "")), 5)


def _inches(ax) -> float:
    """About how wide the axes will be: the layout is not made yet."""
    return 1.13 * ax.get_subplotspec().get_position(ax.figure).width * ax.figure.get_size_inches()[0]


def _slots(ax, data: dict) -> None:
    rows, used = data["rows"], {}
    across = max((len(r["cells"]) for r in rows), default=1)
    for i, row in enumerate(rows):
        for j, c in enumerate(row["cells"]):
            state = used.setdefault(c.get("state", "held"), c.get("state", "held"))
            if pictures.pale(c):
                used["reserved"] = "reserved"
            _slot(ax, j, i, state, c.get("group", 0), pale=pictures.pale(c))
            words = str(c.get("text", ""))
            color = theme.MUTED if state == "evicted" else theme.INK
            ax.text(j + 0.47, i + 0.4, words, ha="center", va="center", color=color,
                    fontsize=min(10.5, _inches(ax) * 72 / max(across, 12) / max(len(words), 1) / 0.62))  # fmt: skip
    ax.set_xlim(-0.05, max(across, 12))
    ax.set_ylim(len(rows) + 0.75, -0.05)
    ax.set_yticks([i + 0.4 for i in range(len(rows))], [r["label"] for r in rows])
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_visible(False)
    groups = data.get("groups", ())
    keys = [("held", g, n) for g, n in enumerate(groups)]
    keys += [(s, 0, n) for s, n in pictures.states(data).items() if s in used and not (groups and s == "held")]
    x, unit = 0.0, max(across, 12) / 100 * max(1, 8.4 / _inches(ax))
    for state, group, words in keys:
        _slot(ax, x, len(rows) + 0.2, state, group, 1.8 * unit, 0.36)
        ax.text(x + 2.4 * unit, len(rows) + 0.38, words, va="center", fontsize=10)
        x += (5 + 1.25 * len(words)) * unit


def _slot(ax, x, y, state, group, wide=0.94, tall=0.8, pale=False) -> None:
    fill = theme.slot_fill("reserved" if pale else state, group)
    edge, line = {"new": (theme.INK, 2.4), "sink": (theme.INK, 1)}.get(state, (theme.MUTED, 0.9))
    ax.add_patch(Rectangle((x, y), wide, tall, fc=fill, ec=edge, lw=line, ls=":" if state == "free" else "-"))
    if state == "sink":
        ax.add_patch(Rectangle((x, y + tall * 0.88), wide, tall * 0.12, fc=theme.INK, ec=theme.INK, lw=1))
    if state == "evicted":
        ax.plot([x, x + wide], [y + tall, y], color=theme.ALERT, lw=1.3)


_DRAW = {"lines": _lines, "bars": _bars, "heatmap": _heatmap, "slots": _slots, "spans": spans.axes}
