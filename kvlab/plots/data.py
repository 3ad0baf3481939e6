"""What a picture is made of: one plain dict, drawn alike by charts.py (SVG), figures.py and interactive.py (plotly).

Plain means dicts, lists, strings, numbers, bools and None: nothing here knows a drawing library. Every picture has
"kind" and "title", and may have "sentence" (what it says, in words and numbers), "note" (device and versions) and
"size" (inches of the matplotlib twin).

kind "lines"
    x, y       axes: {"label": str, "unit": see theme.number, "scale": "linear" | "log2" | "log10", "lo", "hi"}
    series     list of {"variant": a key of theme.VARIANTS or None, "label": by default its name ("\\n" breaks it),
               "x": numbers, "y": numbers, None where it did not fit,
               "sampled": bools, True where the point was measured on a sample and scaled up (drawn hollow),
               "names": words beside the points, one each ("" for none): a scatter of things that have names,
               "points": False hides the markers (closed forms), "dashed": True for predictions beside measurements,
               "solid": True draws it without its variant's dash, in which a saw would fall apart,
               "slope": a fitted exponent to print, "low", "high": the spread of y (a light band)}
    limits     list of {"label": str, "value": y}: what does not fit lies above
    at         an x to mark: where the reader's slider stands
    marks      list of {"label": str, "value": x}: an x that means something, a line with words at its top
kind "bars"    (horizontal, stacked from the left)
    y          the axis of the values, linear
    parts      names of the pieces, from the left
    bars       list of {"variant", "label", "values": one number per part, or None for a bar that did not fit}
    limits     as above
kind "heatmap"
    values     rows of numbers, None for an empty cell;   unit, label: of the values
    rows, columns   names (may be empty lists);   x, y: {"label": str};   lo, hi: the ends of the colours, optional
kind "slots"   (cells in rows: a ring, a block table, a pool)
    rows       list of {"label": str, "cells": [{"text": str, "state": a key of STATES, "group": int,
               "full": False draws a "new" one pale, as one of several slots that are not all written}]}
    groups     names for group 0, 1, ... (requests, say), shown as a legend
    states     {a key of STATES: what the legend calls it here}, optional
kind "spans"   (memory over time: steps to the right, slots upwards)
    steps, lanes   how many steps and slots there are;   x, y: {"label": str}
    spans      list of {"start": slot, "slots": number, "begin": step, "end": step, "group": int, "name": who holds it,
               or "" where that need not be written again, "filled": slots with a token at each step of it}
    at         a step to mark: where the reader's slider stands
kind "panels"
    panels     columns from the left: each a picture of a kind above, or a list of them, one below the other.
               The first picture of a column may have a "weight": how wide its column is beside the others (1);
               each may have "tall": how high it is beside those above and below it (1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from . import theme

STATES = {
    "free": "free",
    "held": "held",
    "reserved": "reserved, empty",
    "new": "written in this step",
    "sink": "sink, kept for good",
    "evicted": "forgotten",
}
_NEEDS = {"lines": ("x", "y", "series"), "bars": ("y", "parts", "bars"), "heatmap": ("values",), "slots": ("rows",),
          "spans": ("x", "y", "steps", "lanes", "spans"),
          "panels": ("panels",)}  # fmt: skip


def check(data: dict) -> str:
    """The picture's kind. Raises ValueError where a key is missing or lists that belong together differ in length."""
    kind = data.get("kind")
    if kind not in _NEEDS:
        raise ValueError(f"a picture's kind is one of {', '.join(_NEEDS)}, not {kind!r}")
    missing = [key for key in (*_NEEDS[kind], *(() if kind == "panels" else ("title",))) if key not in data]
    if missing:
        raise ValueError(f"a picture of kind {kind!r} also needs {', '.join(missing)}")
    for s in data.get("series", ()):
        for key in ("y", "sampled", "low", "high", "names"):
            if key in s and len(s[key]) != len(s["x"]):
                raise ValueError(f"series {name(s)!r} has {len(s['x'])} x but {len(s[key])} {key}")
    for b in data.get("bars", ()):
        if b["values"] is not None and len(b["values"]) != len(data["parts"]):
            raise ValueError(f"bar {name(b)!r} has {len(b['values'])} values for {len(data['parts'])} parts")
    for s in data.get("spans", ()):
        if len(s["filled"]) != s["end"] - s["begin"]:
            raise ValueError(f"a span of {s['end'] - s['begin']} steps has {len(s['filled'])} counts in filled")
    widths = {len(row) for row in data.get("values", ())}
    if len(widths) > 1:
        raise ValueError(f"the rows of a heat map differ in length: {sorted(widths)}")
    for row in data.get("rows", ()) if kind == "slots" else ():
        for cell in row["cells"]:
            if cell.get("state", "held") not in STATES:
                raise ValueError(f"slot state {cell['state']!r} is none of {', '.join(STATES)}")
    return kind


def states(data: dict) -> dict[str, str]:
    """What a slots picture's legend calls each state."""
    return {**STATES, **data.get("states", {})}


def pale(cell: dict) -> bool:
    """Is a cell drawn pale? One that is reserved; and one that was just written and is not full yet."""
    state = cell.get("state", "held")
    return state == "reserved" or (state == "new" and not cell.get("full", True))


def columns(data: dict) -> list[list[dict]]:
    """The panels as columns of pictures."""
    return [column if isinstance(column, list) else [column] for column in data["panels"]]


def talls(column: list[dict]) -> list[float]:
    """How high the pictures of a column are beside each other."""
    return [picture.get("tall", 1) for picture in column]


def name(item: dict) -> str:
    """The label of a series or bar: its own, else its variant's."""
    return item.get("label") or theme.style(item.get("variant")).name


def dash(series: dict, own: tuple) -> tuple:
    """The dash of a line: as the series says, else its variant's `own`."""
    return (5, 4) if series.get("dashed") else () if series.get("solid") else own


def label(series: dict) -> tuple[list[str], str]:
    """What stands at a line's end: the name, in one or more lines, and the fitted slope ("" where there is none)."""
    return name(series).split("\n"), f"slope {series['slope']:.2f}" if series.get("slope") is not None else ""


def label_rows(series: Sequence[dict]) -> int:
    """How many lines of text the tallest label takes: it decides how far apart labels stand."""
    return max((len(lines) + bool(slope) for lines, slope in map(label, series)), default=1)


def finished(series: dict) -> list[tuple[float, float, bool]]:
    """The points that fit: (x, y, sampled)."""
    sampled = series.get("sampled") or [False] * len(series["x"])
    return [(x, y, s) for x, y, s in zip(series["x"], series["y"], sampled, strict=True) if y is not None]


def unfinished(series: dict) -> list[float]:
    """The x of the points that did not fit."""
    return [x for x, y in zip(series["x"], series["y"], strict=True) if y is None]


def heat_range(data: dict) -> tuple[float, float]:
    """The values at the two ends of a heat map's colours; light is 0 where no value is below it."""
    cells = [v for row in data["values"] for v in row if v is not None]
    lo, hi = data.get("lo", min([0.0, *cells])), data.get("hi", max(cells, default=1.0))
    return lo, hi if hi > lo else lo + 1.0


def describe(data: dict) -> str:
    """The picture in words, with its numbers: the aria-label of the SVG and the alt text of the PNG."""
    kind = check(data)
    if kind == "panels":
        return " ".join(describe(panel) for column in columns(data) for panel in column)
    if kind == "lines":
        parts = [_describe_series(s, data) for s in data["series"]]
    elif kind == "bars":
        unit, names = data["y"].get("unit", ""), data["parts"]
        parts = [f"{name(b)} {_describe_bar(b['values'], names, unit)}" for b in data["bars"]]
    elif kind == "heatmap":
        cells = [v for row in data["values"] for v in row if v is not None]
        unit = data.get("unit", "")
        span = f"from {theme.number(min(cells), unit)} to {theme.number(max(cells), unit)}" if cells else "empty"
        parts = [f"{len(data['values'])} by {max(map(len, data['values']), default=0)} cells, {span}"]
    elif kind == "spans":
        parts = [f"{data['lanes']} slots over {data['steps']} steps, {len(data['spans'])} pieces"]
        if (at := data.get("at")) is not None:
            here = [s for s in data["spans"] if s["begin"] <= at < s["end"]]
            with_token = sum(s["filled"][at - s["begin"]] for s in here)
            parts.append(f"step {at}: {sum(s['slots'] for s in here)} held, {with_token} with a token")
    else:
        parts = [f"{r['label']}: {_describe_cells(r['cells'], data)}" for r in data["rows"]]
    unit = data.get("y", {}).get("unit", "")
    for m in data.get("limits", ()):
        value = theme.number(m["value"], unit)
        parts.append(f"limit: {m['label']}" + ("" if value in m["label"] else f" {value}"))
    x = data.get("x", {}).get("unit", "")
    parts += [f"mark: {m['label']} at {theme.number(m['value'], x)}" for m in data.get("marks", ())]
    return f"{data['title']}: " + "; ".join(parts) + "."


def _describe_series(s: dict, data: dict) -> str:
    unit, at, done = data["y"].get("unit", ""), data.get("at"), finished(s)
    if s.get("names"):
        named = [n for n, y in zip(s["names"], s["y"], strict=True) if y is not None]
        words = [
            f"{n} {theme.number(y, unit)} at {theme.number(x, data['x'].get('unit', ''))}".strip()
            for n, (x, y, _) in zip(named, done, strict=True)
        ]
        return f"{' '.join(label(s)[0])}: {', '.join(words) or 'no points'}"
    if at is not None and done:
        chosen = [min(done, key=lambda p: abs(p[0] - at))]
    else:
        chosen = [done[0], done[-1]] if len(done) > 1 else done
    words = [f"{theme.number(y, unit)} at {theme.number(x, data['x'].get('unit', ''))}" for x, y, _ in chosen]
    lost = unfinished(s)
    words += [f"did not fit at {', '.join(theme.number(x, data['x'].get('unit', '')) for x in lost)}"] if lost else []
    lines, slope = label(s)
    said = " ".join(lines) + (f", {slope}" if slope else "")
    return f"{said}: {', '.join(words) or 'no points'}"


def short(value: float, unit: str) -> str:
    """A number where the unit stands nearby: the prefix stays ("470 M"), bytes and seconds keep theirs."""
    return theme.si(value) if unit.startswith("FLOP") else theme.number(value, unit)


def bar_words(values: list | None, unit: str) -> str:
    """What stands at a bar's end: the total and, on a second line, its parts."""
    total = theme.number(None if values is None else sum(values), unit)
    return total if values is None or len(values) == 1 else f"{total}\n{' + '.join(short(v, unit) for v in values)}"


def _describe_bar(values, names, unit) -> str:
    if values is None:
        return "did not fit"
    if len(values) == 1:
        return theme.number(values[0], unit)
    pieces = ", ".join(f"{n} {theme.number(v, unit)}" for n, v in zip(names, values, strict=True))
    return f"{theme.number(sum(values), unit)} ({pieces})"


def _describe_cells(cells: list[dict], data: dict) -> str:
    """A row in words: what stands in each cell; of cells without words how many there are of a kind."""
    names, groups, said = states(data), data.get("groups", ()), []

    def words(cell):
        state, group, text = cell.get("state", "held"), cell.get("group", 0), cell.get("text", "")
        if text:
            return text + ("" if state in ("held", "free") else f" ({state})")
        return groups[group] if state == "held" and group < len(groups) else names[state]

    for word, run in groupby(cells, key=words):
        first, *more = run
        many = first.get("text") or len(more) < 2
        said += [word] * (len(more) + 1) if many else [f"{word} ×{len(more) + 1}"]
    return " ".join(said)
