"""A small SVG writer: the pictures that move with a slider, in a few milliseconds of plain Python.

draw(data) takes the dict that data.py describes and returns one <svg role="img"> whose aria-label states the numbers.
No ids, no styles, no scripts: two pictures on one page cannot disturb each other, and every front-end shows them.
"""

from __future__ import annotations

from html import escape

from . import data as pictures
from . import theme
from .scale import scale_for, spread

INK, MUTED, GRID, PAPER, ALERT = theme.INK, theme.MUTED, theme.GRID, theme.PAPER, theme.ALERT


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

    def text(self, x, y, words, size=14, color=INK, anchor="start", bold=False) -> None:
        weight = "600" if bold else None
        self.add("text", escape(str(words)), x=float(x), y=float(y), font_size=size, fill=color,
                 text_anchor=None if anchor == "start" else anchor, font_weight=weight)  # fmt: skip

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


def draw(data: dict, width: float = 720, height: float | None = None) -> str:
    """The picture as SVG (or, for panels, as a row of them that wraps). Raises ValueError for data it cannot draw."""
    kind = pictures.check(data)
    if kind == "panels":
        cells = "".join(
            f'<div style="flex:1 1 {380 * p.get("weight", 1):g}px;min-width:0">{draw(p, 520 * p.get("weight", 1), 380)}</div>'
            for p in data["panels"]
        )
        return f'<div style="display:flex;flex-wrap:wrap;gap:12px;background:{PAPER}">{cells}</div>'
    return {"lines": _lines, "bars": _bars, "heatmap": _heatmap, "slots": _slots}[kind](data, width, height)


def _dash(dash) -> str | None:
    return ",".join(f"{d:g}" for d in dash) or None


def _wide(words: str, size: float = 14) -> float:
    """About how wide a text is, in units: good enough for margins."""
    return 0.54 * size * len(words)


def _head(svg: Svg, data: dict, left: float, under: str = "") -> None:
    svg.text(8, 22, data["title"], 16, bold=True)
    svg.text(8, 44, under, 13, MUTED)
    if data.get("note"):
        svg.text(8, svg.height - 8, data["note"], 11, MUTED)


def _lines(data: dict, width: float, height: float | None) -> str:
    svg = Svg(width, height or 400)
    series, limits, unit = data["series"], data.get("limits", ()), data["y"].get("unit", "")
    xs = scale_for([v for s in series for v in s["x"]], data["x"])
    seen = [v for s in series for key in ("y", "low", "high") for v in s.get(key, ())]
    ys = scale_for(seen + [m["value"] for m in limits], data["y"])
    names = [pictures.label(s) for s in series]
    ticks = ys.ticks()
    left = 16 + max((_wide(t, 13) for _, t in ticks), default=30)
    right, top = width - 26 - max((_wide(n) for n in names), default=0), 60
    bottom = svg.height - (66 if data.get("note") else 48)

    def place(x, y):
        return left + xs.at(x) * (right - left), bottom - ys.at(y) * (bottom - top)

    _head(svg, data, left, data["y"].get("label", ""))
    for value, text in ticks:
        y = place(xs.lo, value)[1]
        svg.line(left, y, right, y, GRID)
        svg.text(left - 8, y + 4.5, text, 13, anchor="end")
    for value, text in xs.ticks(max(3, int((right - left) / 75))):
        x = place(value, ys.lo)[0]
        svg.line(x, bottom, x, bottom + 5)
        svg.text(x, bottom + 20, text, 13, anchor="middle")
    svg.line(left, bottom, right, bottom)
    svg.text((left + right) / 2, bottom + 40, data["x"].get("label", ""), 13, MUTED, "middle")
    for m in limits:
        y = place(xs.lo, m["value"])[1]
        svg.rect(left, top - 6, right - left, max(y - top + 6, 0), ALERT, opacity=0.06)
        svg.line(left, y, right, y, ALERT, 1.6, (6, 4))
        svg.text(left + 6, y - 6, m["label"], 13, ALERT)
    if data.get("at") is not None:
        x = place(data["at"], ys.lo)[0]
        svg.line(x, top - 6, x, bottom, INK, 1.2, (2, 3))
    ends = []
    for s in series:
        look, done = theme.style(s.get("variant"), s.get("label", "")), pictures.finished(s)
        if "low" in s:
            band = [(x, lo, hi) for x, lo, hi in zip(s["x"], s["low"], s["high"], strict=True) if lo is not None]
            edge = [place(x, lo) for x, lo, _ in band] + [place(x, hi) for x, _, hi in reversed(band)]
            svg.path(edge, fill=look.color, opacity=0.15)
        points = [place(x, y) for x, y, _ in done]
        if points:
            svg.path(points, look.color, dash=(5, 4) if s.get("dashed") else look.dash)
        near = min(done, key=lambda p: abs(p[0] - data["at"]), default=None) if data.get("at") is not None else None
        for (px, py), point in zip(points, done, strict=True):
            if s.get("points", True) or point is near:
                words = f"{pictures.name(s)}: {theme.number(point[1], unit)} at {xs.label(point[0])}"
                svg.marker(px, py, look.marker, look.color, point[2], words + (", sampled" if point[2] else ""))
        for x in pictures.unfinished(s):
            svg.cross(place(x, ys.lo)[0], top, look.color, f"{pictures.name(s)}: did not fit at {xs.label(x)}")
        ends.append(points[-1] if points else (right, top))
    for s, words, (ex, ey), y in zip(series, names, ends, spread([e[1] for e in ends], 17, top, bottom), strict=True):
        look = theme.style(s.get("variant"))
        if abs(y - ey) > 3 or right - ex > 8:
            svg.line(ex + 6, ey, right + 5, y, look.color, 0.8)
        svg.text(right + 10, y + 4.5, words, 14, look.text, bold=True)
    return svg.done(pictures.describe(data))


def _bars(data: dict, width: float, height: float | None) -> str:
    bars, limits, unit = data["bars"], data.get("limits", ()), data["y"].get("unit", "")
    totals = [None if b["values"] is None else sum(b["values"]) for b in bars]
    xs = scale_for(totals + [m["value"] for m in limits], data["y"])
    names = [pictures.name(b) for b in bars]
    left, right = 18 + max(map(_wide, names), default=0), width - 14 - max(_wide(theme.number(t, unit)) for t in totals)
    top, step = 76 if len(data["parts"]) > 1 else 58, 44
    svg = Svg(width, height or top + step * len(bars) + (72 if data.get("note") else 54))
    bottom = svg.height - (66 if data.get("note") else 48)
    step = min((bottom - top) / max(len(bars), 1), 72)
    bottom = top + step * len(bars)

    def place(value):
        return left + xs.at(value) * (right - left)

    _head(svg, data, left, data["y"].get("label", ""))
    x = 8.0
    for i, part in enumerate(data["parts"] if len(data["parts"]) > 1 else ()):
        svg.rect(x, 56, 12, 12, theme.mix(MUTED, PAPER, min(0.6 * i, 0.85)), MUTED)
        svg.text(x + 18, 67, part, 13)
        x += 34 + _wide(part, 13)
    for value, text in xs.ticks(max(2, int((right - left) / 90))):
        svg.line(place(value), top, place(value), bottom, GRID)
        svg.text(place(value), bottom + 18, text, 13, anchor="middle")
    for i, (b, total) in enumerate(zip(bars, totals, strict=True)):
        look, y, thick = theme.style(b.get("variant")), top + step * (i + 0.18), step * 0.64
        svg.text(left - 10, y + thick / 2 + 5, names[i], 14, look.text, "end", True)
        x = left
        for part, value in enumerate(b["values"] or ()):
            wide = xs.at(value) * (right - left)
            words = f"{names[i]}, {data['parts'][part]}: {theme.number(value, unit)}"
            svg.rect(x, y, wide, thick, look.tone(part), look.color, words)
            x += wide
        if total is None:
            svg.cross(left + 10, y + thick / 2, look.color)
            x += 18
        svg.text(x + 8, y + thick / 2 + 5, theme.number(total, unit))
    svg.line(left, top, left, bottom)
    for m in limits:
        svg.line(place(m["value"]), top - 4, place(m["value"]), bottom, ALERT, 1.6, (6, 4))
        svg.text(place(m["value"]), bottom + 36, m["label"], 13, ALERT, "middle")
    return svg.done(pictures.describe(data))


def _heatmap(data: dict, width: float, height: float | None) -> str:
    values, rows, columns = data["values"], data.get("rows", ()), data.get("columns", ())
    lo, hi = pictures.heat_range(data)
    across = max(map(len, values), default=1)
    left, right, top = 18 + max((_wide(str(r), 12) for r in rows), default=0), width - 96, 58
    cell = (right - left) / across
    tall = max(min(cell, ((height or 420) - 120) / max(len(values), 1)), 3)
    svg = Svg(width, height or top + tall * len(values) + 62)
    _head(svg, data, left, data.get("y", {}).get("label", ""))
    boxes = {}  # one path per colour: a thousand cells stay a small string
    for i, row in enumerate(values):
        for j, v in enumerate(row):
            if v is not None:
                color = theme.ramp(round(31 * (v - lo) / (hi - lo)) / 31)
                boxes.setdefault(color, []).append(
                    f"M{left + j * cell:.1f} {top + i * tall:.1f}h{cell:.2f}v{tall:.2f}h{-cell:.2f}z"
                )
    for color, path in boxes.items():
        svg.add("path", d="".join(path), fill=color)
    bottom = top + tall * len(values)
    svg.rect(left, top, right - left, bottom - top, "none", MUTED)
    for i in range(0, len(rows), max(1, round(15 / tall))):
        svg.text(left - 8, top + (i + 0.5) * tall + 4, rows[i], 12, anchor="end")
    widest = max((_wide(str(c), 12) for c in columns), default=1) + 8
    for j in range(0, len(columns), max(1, -int(-widest // cell))):
        svg.text(left + (j + 0.5) * cell, bottom + 17, columns[j], 12, anchor="middle")
    svg.text((left + right) / 2, bottom + 37, data.get("x", {}).get("label", ""), 13, MUTED, "middle")
    for k in range(32):
        svg.rect(right + 14, bottom - (k + 1) * (bottom - top) / 32, 14, (bottom - top) / 32 + 0.5, theme.ramp(k / 31))
    svg.text(right + 34, top + 11, theme.number(hi, data.get("unit", "")), 12)
    svg.text(right + 34, bottom, theme.number(lo, data.get("unit", "")), 12)
    return svg.done(pictures.describe(data))


def _slots(data: dict, width: float, height: float | None) -> str:
    rows, groups = data["rows"], data.get("groups", ())
    left = 18 + max((_wide(r["label"]) for r in rows), default=0)
    across = max((len(r["cells"]) for r in rows), default=1)
    cell = min((width - left - 12) / max(across, 1), 46)
    tall, top = max(min(cell, 40), 20), 50
    svg = Svg(width, height or top + (tall + 10) * len(rows) + (54 if data.get("note") else 34))
    _head(svg, data, left)
    used = {}
    for i, row in enumerate(rows):
        y = top + i * (tall + 10)
        svg.text(left - 10, y + tall / 2 + 5, row["label"], 14, anchor="end")
        for j, c in enumerate(row["cells"]):
            state, words = c.get("state", "held"), str(c.get("text", ""))
            used[state] = None
            _slot(svg, left + j * cell, y, cell - 3, tall, state, c.get("group", 0), words)
    x, y = 8.0, svg.height - (42 if data.get("note") else 22)
    keys = [("held", g, n) for g, n in enumerate(groups)]
    keys += [(s, 0, n) for s, n in pictures.STATES.items() if s in used and not (groups and s == "held")]
    for state, group, words in keys:
        _slot(svg, x, y, 16, 14, state, group, "")
        svg.text(x + 22, y + 12, words, 13)
        x += 42 + _wide(words, 13)
    return svg.done(pictures.describe(data))


def _slot(svg: Svg, x, y, wide, tall, state, group, words) -> None:
    fill = theme.GROUPS[group % len(theme.GROUPS)] if state in ("held", "new", "sink") else PAPER
    edge = {"new": (INK, 2.6), "sink": (INK, 1)}.get(state, (MUTED, 1))
    svg.rect(x, y, wide, tall, fill, *edge[:1], stroke_width=edge[1], dash=(3, 3) if state == "free" else ())
    if state == "sink":
        svg.rect(x, y + tall - 4, wide, 4, INK)
    if state == "evicted":
        svg.line(x, y + tall, x + wide, y, ALERT, 1.5)
    size = max(min(13, wide / max(len(words), 1) / 0.58), 6)
    svg.text(x + wide / 2, y + tall / 2 + size * 0.36, words, size, MUTED if state == "evicted" else INK, "middle")
