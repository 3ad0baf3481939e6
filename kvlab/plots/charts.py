"""Pictures as SVG, from the dicts that data.py describes: lines and bars here, heat maps and slots in cells.py.

draw(data) takes a millisecond or two, so a slider can drag it; its aria-label states the numbers.
"""

from __future__ import annotations

from . import cells, spans, theme
from . import data as pictures
from .scale import scale_for, spread
from .svg import Svg, head, text_width
from .theme import ALERT, GRID, INK, MUTED, PAPER


def draw(data: dict, width: float = 720, height: float | None = None) -> str:
    """The picture as SVG; panels become columns of them. Raises ValueError for data it cannot draw (see data.py)."""
    kind, talls = pictures.check(data), pictures.talls
    if kind == "panels":
        columns, sheet = pictures.columns(data), 1000
        shares = [c[0].get("weight", 1) for c in columns]
        html = ""
        for column, share in zip(columns, shares, strict=True):
            wide_ = sheet * share / sum(shares)
            tall = max(430, 215 * max(sum(talls(c)) for c in columns)) / sum(talls(column))
            drawn = "".join(draw(p, wide_, tall * t) for p, t in zip(column, talls(column), strict=True))
            html += f'<div style="flex:{share} 1 0;min-width:0">{drawn}</div>'
        return f'<div style="display:flex;max-width:{sheet * 1.25:g}px;background:{PAPER}">{html}</div>'
    own = {"lines": _lines, "bars": _bars, "heatmap": cells.heatmap, "slots": cells.slots, "spans": spans.draw}
    return own[kind](data, width, height)


def _lines(data: dict, width: float, height: float | None) -> str:
    svg = Svg(width, height or 400)
    series, limits, unit = data["series"], data.get("limits", ()), data["y"].get("unit", "")
    marks = data.get("marks", ())
    xs = scale_for([v for s in series for v in s["x"]] + [m["value"] for m in marks], data["x"])
    seen = [v for s in series for key in ("y", "low", "high") for v in s.get(key, ())]
    ys = scale_for(seen + [m["value"] for m in limits], data["y"])
    labels = [pictures.label(s) for s in series]
    ticks = ys.ticks()
    left = 16 + max((text_width(t, 13) for _, t in ticks), default=30)
    right, top = width - 26 - max((text_width(t) for n, slope in labels for t in (*n, slope)), default=0), 60
    bottom = svg.height - (66 if data.get("note") else 48)

    def place(x, y):
        return left + xs.at(x) * (right - left), bottom - ys.at(y) * (bottom - top)

    head(svg, data, data["y"].get("label", ""))
    for value, text in ticks:
        y = place(xs.lo, value)[1]
        svg.line(left, y, right, y, GRID)
        svg.text(left - 8, y + 4.5, text, 13, anchor="end")
    for value, text in xs.ticks(max(3, int((right - left) / 58))):
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
    for i, m in enumerate(marks):
        x, y = place(m["value"], ys.lo)[0], top + 6 + 17 * i
        svg.line(x, top - 6, x, bottom, MUTED, 1.4, (6, 4))
        right_of = x + 6 + text_width(m["label"], 13) < right
        svg.text(x + (6 if right_of else -6), y, m["label"], 13, MUTED, "start" if right_of else "end", halo=True)
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
            svg.path(points, look.color, dash=pictures.dash(s, look.dash))
        near = min(done, key=lambda p: abs(p[0] - data["at"]), default=None) if data.get("at") is not None else None
        for (px, py), point in zip(points, done, strict=True):
            if s.get("points", True) or point is near:
                words = f"{' '.join(pictures.label(s)[0])}: {theme.number(point[1], unit)} at {xs.label(point[0])}"
                svg.marker(px, py, look.marker, look.color, point[2], words + (", sampled" if point[2] else ""))
        for x in pictures.unfinished(s):
            svg.cross(
                place(x, ys.lo)[0], top, look.color, f"{' '.join(pictures.label(s)[0])}: did not fit at {xs.label(x)}"
            )
        for x, y, words in zip(s["x"], s["y"], s.get("names", ()), strict=False):
            if y is not None and words:
                px, py = place(x, y)
                svg.text(px + 8, py - 8, words, 12.5, look.text, halo=True)
        ends.append(points[-1] if points else (right, top))
    places = spread([e[1] for e in ends], 16 * pictures.label_rows(series) + 1, top, bottom)
    for s, (names, slope), (ex, ey), y in zip(series, labels, ends, places, strict=True):
        look = theme.style(s.get("variant"))
        if abs(y - ey) > 3 or right - ex > 8:
            svg.line(ex + 6, ey, right + 5, y, look.color, 0.8)
        for i, words in enumerate(names):
            svg.text(right + 10, y + 4.5 + 16 * i, words, 14, look.text, bold=True)
        svg.text(right + 10, y + 3 + 16 * len(names), slope, 12, MUTED)
    return svg.done(pictures.describe(data))


def _bars(data: dict, width: float, height: float | None) -> str:
    bars, limits, unit = data["bars"], data.get("limits", ()), data["y"].get("unit", "")
    totals = [None if b["values"] is None else sum(b["values"]) for b in bars]
    xs = scale_for(totals + [m["value"] for m in limits], data["y"])
    names = [pictures.name(b) for b in bars]
    left, right = (
        18 + max(map(text_width, names), default=0),
        width
        - 14
        - max(
            (
                text_width(w, 14 - 2.5 * i)
                for b in bars
                for i, w in enumerate(pictures.bar_words(b["values"], unit).split("\n"))
            ),
            default=0,
        ),
    )
    foot = 28 + (18 if data.get("note") else 0) + (18 if limits else 0)
    top, step = 76 if len(data["parts"]) > 1 else 58, 44
    svg = Svg(width, height or top + step * len(bars) + foot)
    bottom = svg.height - foot
    step = min((bottom - top) / max(len(bars), 1), 72)
    bottom = top + step * len(bars)

    def place(value):
        return left + xs.at(value) * (right - left)

    head(svg, data, data["y"].get("label", ""))
    x = 8.0
    for i, part in enumerate(data["parts"] if len(data["parts"]) > 1 else ()):
        svg.rect(x, 56, 12, 12, theme.mix(MUTED, PAPER, min(0.6 * i, 0.85)), MUTED)
        svg.text(x + 18, 67, part, 13)
        x += 34 + text_width(part, 13)
    for value, text in xs.ticks(max(2, int((right - left) / 90))):
        svg.line(place(value), top, place(value), bottom, GRID)
        svg.text(place(value), bottom + 18, text, 13, anchor="middle")
    for m in limits:
        svg.line(place(m["value"]), top - 4, place(m["value"]), bottom, ALERT, 1.6, (6, 4))
        svg.text(place(m["value"]), bottom + 36, m["label"], 13, ALERT, "middle")
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
        words, *parts = pictures.bar_words(b["values"], unit).split("\n")
        svg.text(x + 8, y + thick / 2 + (-1 if parts else 5), words, halo=True)
        svg.text(x + 8, y + thick / 2 + 13, "".join(parts), 11.5, MUTED, halo=True)
    svg.line(left, top, left, bottom)
    return svg.done(pictures.describe(data))
