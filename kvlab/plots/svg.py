"""A small SVG writer: shapes in, one <svg role="img"> out. charts.py and cells.py draw with it.

No ids, no style sheets, no scripts: two pictures on one page cannot disturb each other, and every front-end shows them.
Paper and ink are written into the picture, so that it reads the same on a dark theme.
"""

from __future__ import annotations

from html import escape

from . import theme
from .theme import INK, MUTED, PAPER


class Svg:
    """Shapes on a sheet of width x height units; it scales to the width that the page gives it."""

    def __init__(self, width: float = 720, height: float = 380):
        self.width, self.height, self.parts = width, height, []

    def add(self, tag: str, body: str = "", **attributes) -> None:
        """One element. Attribute names with _ become -; None is left out; every value is escaped."""
        text = "".join(
            f' {k.strip("_").replace("_", "-")}="{v:.1f}"' if isinstance(v, float)
            else f' {k.strip("_").replace("_", "-")}="{escape(str(v))}"'
            for k, v in attributes.items() if v is not None
        )  # fmt: skip
        self.parts.append(f"<{tag}{text}>{body}</{tag}>" if body else f"<{tag}{text}/>")

    def text(self, x, y, words, size=14, color=INK, anchor="start", bold=False, halo=False) -> None:
        """Words at a base line; halo keeps them readable across a line."""
        weight = "600" if bold else None
        around = {"paint_order": "stroke", "stroke": PAPER, "stroke_width": 4} if halo else {}
        self.add("text", escape(str(words)), x=float(x), y=float(y), font_size=size, fill=color,
                 text_anchor=None if anchor == "start" else anchor, font_weight=weight, **around)  # fmt: skip

    def line(self, x1, y1, x2, y2, color=MUTED, width=1.0, dash=()) -> None:
        self.add("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), stroke=color, stroke_width=width,
                 stroke_dasharray=_dash(dash))  # fmt: skip

    def rect(self, x, y, width, height, fill, stroke=None, title="", stroke_width=1, dash=(), opacity=None) -> None:
        body = f"<title>{escape(title)}</title>" if title else ""
        self.add("rect", body, x=float(x), y=float(y), width=float(width), height=float(height), fill=fill,
                 stroke=stroke, stroke_width=stroke_width if stroke else None, stroke_dasharray=_dash(dash),
                 opacity=opacity)  # fmt: skip

    def path(self, points, color=None, width=2.4, dash=(), fill="none", opacity=None) -> None:
        self.add("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) + ("" if fill == "none" else "Z"),
                 fill=fill, stroke=color, stroke_width=width if color else None, stroke_linejoin="round",
                 stroke_dasharray=_dash(dash), opacity=opacity)  # fmt: skip

    def marker(self, x, y, shape, color, hollow=False, title="", size=4.5) -> None:
        body = f"<title>{escape(title)}</title>" if title else ""
        look = {"fill": PAPER if hollow else color, "stroke": color, "stroke_width": 1.8}
        outline = theme.MARKERS[shape][2]
        if outline is None:
            self.add("circle", body, cx=float(x), cy=float(y), r=size, **look)
        else:
            corners = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in outline)
            self.add("polygon", body, points=corners, **look)

    def cross(self, x, y, color, title="did not fit", size=5) -> None:
        d = f"M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
        self.add("path", f"<title>{escape(title)}</title>", d=d, stroke=color, stroke_width=2.6, fill="none")

    def done(self, label: str) -> str:
        """The finished element; `label` says what the picture shows to those who do not see it."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="{escape(theme.FONT)}" '
            f'style="width:100%;max-width:{self.width * 1.25:g}px;height:auto;background:{PAPER}">'
            f'<rect width="100%" height="100%" fill="{PAPER}"/>{"".join(self.parts)}</svg>'
        )


def _dash(dash) -> str | None:
    return ",".join(f"{d:g}" for d in dash) or None


def text_width(words: str, size: float = 14) -> float:
    """About how wide a text is, in units, bold included: good enough for margins."""
    return 0.575 * size * len(words)


def head(svg: Svg, data: dict, under: str = "") -> None:
    """Title, the line under it (what the values are) and the note at the foot."""
    svg.text(8, 22, data["title"], 16, bold=True)
    svg.text(8, 44, under, 13, MUTED)
    if data.get("note"):
        svg.text(8, svg.height - 8, data["note"], 11, MUTED)
