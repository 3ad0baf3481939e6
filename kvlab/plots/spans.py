"""Memory over time: who holds which slots from which step to which, as SVG and in matplotlib (kind "spans", data.py).

A span is drawn twice: pale for the slots that are held, in full colour for those of them that have a token.
"""

from __future__ import annotations

from . import data as pictures
from . import theme
from .scale import scale_for
from .svg import Svg, head, text_width
from .theme import INK, MUTED, PAPER


def outline(span: dict) -> list[tuple[float, float]]:
    """The slots with a token as a polygon of (step, slot): a staircase that rises as tokens are written."""
    points, last = [(span["begin"], span["start"])], 0
    for i, n in enumerate(span["filled"]):
        if n != last:
            points += [(span["begin"] + i, span["start"] + last), (span["begin"] + i, span["start"] + n)]
            last = n
    return [*points, (span["end"], span["start"] + last), (span["end"], span["start"])]


def sides(data: dict, width: float) -> tuple[float, float]:
    """The x at which the first step begins and the last one ends."""
    return 20 + text_width(str(data["lanes"]), 13), width - 20


def draw(data: dict, width: float, height: float | None) -> str:
    svg = Svg(width, height or 400)
    (left, right), top = sides(data, width), 58
    bottom = svg.height - (66 if data.get("note") else 46)
    across, tall = (right - left) / data["steps"], (bottom - top) / data["lanes"]
    head(svg, data, data["y"].get("label", ""))
    pale, full = {}, {}
    for s in data["spans"]:
        x, y = left + s["begin"] * across, bottom - (s["start"] + s["slots"]) * tall
        box = f"M{x:.1f} {y:.1f}h{(s['end'] - s['begin']) * across:.1f}v{s['slots'] * tall:.1f}H{x:.1f}z"
        corners = (f"{left + step * across:.1f} {bottom - slot * tall:.1f}" for step, slot in outline(s))
        pale.setdefault(s["group"], []).append(box)
        full.setdefault(s["group"], []).append(f"M{'L'.join(corners)}z")
    for group in pale:  # one path a colour: hundreds of spans stay a small string
        svg.add("path", d="".join(pale[group]), fill=theme.slot_fill("reserved", group))
        svg.add("path", d="".join(full[group]), fill=theme.slot_fill("held", group))
    for group in pale:
        svg.add("path", d="".join(pale[group]), fill="none", stroke=PAPER, stroke_width=1)
    svg.rect(left, top, right - left, bottom - top, "none", MUTED)
    for value, text in scale_for([0, data["steps"]], data["x"]).ticks(12):
        if value <= data["steps"]:
            svg.text(left + value * across, bottom + 18, text, 13, anchor="middle")
    for slot in (0, data["lanes"]):
        svg.text(left - 8, bottom - slot * tall + 5, slot, 13, anchor="end")
    svg.text((left + right) / 2, bottom + 37, data["x"].get("label", ""), 13, MUTED, "middle")
    for s in data["spans"]:
        if (
            s.get("name")
            and s["slots"] * tall >= 9
            and (s["end"] - s["begin"]) * across > 4 + text_width(s["name"], 11)
        ):
            svg.text(left + s["begin"] * across + 2, bottom - (s["start"] + s["slots"] / 2) * tall + 4, s["name"], 11)
    if data.get("at") is not None:
        x = left + (data["at"] + 0.5) * across
        svg.line(x, top - 6, x, bottom + 4, INK, 2)
    return svg.done(pictures.describe(data))


def axes(ax, data: dict) -> None:
    """The same on a matplotlib axis."""
    from matplotlib.patches import Polygon, Rectangle

    ax.set_xlim(0, data["steps"])
    ax.set_ylim(0, data["lanes"])
    box = ax.get_subplotspec().get_position(ax.figure)
    tall = 0.8 * box.height * ax.figure.get_size_inches()[1] * 72 / data["lanes"]  # points a slot, about
    for s in data["spans"]:
        corner, size = (s["begin"], s["start"]), (s["end"] - s["begin"], s["slots"])
        ax.add_patch(Rectangle(corner, *size, fc=theme.slot_fill("reserved", s["group"]), lw=0))
        ax.add_patch(Polygon(outline(s), fc=theme.slot_fill("held", s["group"]), lw=0))
        ax.add_patch(Rectangle(corner, *size, fc="none", ec=PAPER, lw=0.7))
        if s.get("name") and s["slots"] * tall >= 5.5:
            ax.text(s["begin"] + 0.3, s["start"] + s["slots"] / 2, s["name"], va="center", clip_on=True,
                    fontsize=min(8, 1.1 * s["slots"] * tall))  # fmt: skip
    ax.grid(visible=False)
    ax.set_yticks([0, data["lanes"]])
    ax.set_xlabel(data["x"].get("label", ""))
    ax.set_ylabel(data["y"].get("label", ""))
    if data.get("at") is not None:
        ax.axvline(data["at"] + 0.5, color=INK, lw=1.6)
