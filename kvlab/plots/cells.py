"""Heat maps and rows of slots (rings, block tables, pools) as SVG, from the dicts that data.py describes."""

from __future__ import annotations

from . import data as pictures
from . import theme
from .svg import Svg, head, text_width
from .theme import ALERT, INK, MUTED


def heatmap(data: dict, width: float, height: float | None) -> str:
    values, rows, columns = data["values"], data.get("rows", ()), data.get("columns", ())
    lo, hi = pictures.heat_range(data)
    across = max(map(len, values), default=1)
    left, right, top = 18 + max((text_width(str(r), 12) for r in rows), default=0), width - 100, 58
    cell = (right - left) / across
    room = ((height or 420) - 120) / max(len(values), 1)
    tall = max(room if height else min(cell, room), 3)  # in a panel the rows fill the height that there is
    svg = Svg(width, height or top + tall * len(values) + 62)
    head(svg, data, data.get("y", {}).get("label", ""))
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
    widest = max((text_width(str(c), 12) for c in columns), default=1) + 8
    for j in range(0, len(columns), max(1, -int(-widest // cell))):
        svg.text(left + (j + 0.5) * cell, bottom + 17, columns[j], 12, anchor="middle")
    svg.text((left + right) / 2, bottom + 37, data.get("x", {}).get("label", ""), 13, MUTED, "middle")
    for k in range(32):
        svg.rect(right + 14, bottom - (k + 1) * (bottom - top) / 32, 14, (bottom - top) / 32 + 0.5, theme.ramp(k / 31))
    svg.text(right + 34, top + 11, theme.number(hi, data.get("unit", "")), 12)
    svg.text(right + 34, bottom, theme.number(lo, data.get("unit", "")), 12)
    return svg.done(pictures.describe(data))


def slots(data: dict, width: float, height: float | None) -> str:
    rows, groups = data["rows"], data.get("groups", ())
    left = 18 + max((text_width(r["label"]) for r in rows), default=0)
    across = max((len(r["cells"]) for r in rows), default=1)
    cell = min((width - left - 12) / max(across, 1), 46)
    tall, top = max(min(cell, 40), 20), 50
    svg = Svg(width, height or top + (tall + 10) * len(rows) + (54 if data.get("note") else 34))
    head(svg, data)
    used = {}
    for i, row in enumerate(rows):
        y = top + i * (tall + 10)
        svg.text(left - 10, y + tall / 2 + 5, row["label"], 14, anchor="end")
        for j, c in enumerate(row["cells"]):
            state, words = c.get("state", "held"), str(c.get("text", ""))
            used[state] = None
            if pictures.pale(c):
                used["reserved"] = None
            _slot(svg, left + j * cell, y, cell - 3, tall, state, c.get("group", 0), words, pictures.pale(c))
    x, y = 8.0, svg.height - (42 if data.get("note") else 22)
    keys = [("held", g, n) for g, n in enumerate(groups)]
    keys += [(s, 0, n) for s, n in pictures.states(data).items() if s in used and not (groups and s == "held")]
    for state, group, words in keys:
        _slot(svg, x, y, 16, 14, state, group, "")
        svg.text(x + 22, y + 12, words, 13)
        x += 42 + text_width(words, 13)
    return svg.done(pictures.describe(data))


def _slot(svg: Svg, x, y, wide, tall, state, group, words, pale=False) -> None:
    fill = theme.slot_fill("reserved" if pale else state, group)
    edge = {"new": (INK, 2.6), "sink": (INK, 1)}.get(state, (MUTED, 1))
    svg.rect(x, y, wide, tall, fill, *edge[:1], stroke_width=edge[1], dash=(3, 3) if state == "free" else ())
    if state == "sink":
        svg.rect(x, y + tall - 4, wide, 4, INK)
    if state == "evicted":
        svg.line(x, y + tall, x + wide, y, ALERT, 1.5)
    size = max(min(13, wide / max(len(words), 1) / 0.58), 6)
    svg.text(x + wide / 2, y + tall / 2 + size * 0.36, words, size, MUTED if state == "evicted" else INK, "middle")
