"""The pool over time as a plotly film: frames, a slider and a play button that work without a kernel."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..serving.trace import Trace
from . import theme
from .pool import CELL, SHARED, cells, colors, said

PALE = len(theme.GROUPS)  # a cell's number is its group, PALE more where it is not full
MS = 220  # a frame


def pool_film(trace: Trace, title: str, across: int = 12) -> go.Figure:
    """Above, every cell of CELL slots against the model step, with a line at the step that is shown; below, the cells
    at that step. Pieces of the trace must be whole cells.
    """
    states = [cells(trace, step) for step in range(trace.step)]
    owner = {group: "shared" if id == SHARED else str(id) for id, group in colors(trace).items()}
    over_time = list(map(list, zip(*[[_number(c) for c in state] for state in states])))  # (cells, steps)
    hover = [[_hover(c, owner, i) for c in state] for i, state in enumerate(states)]
    figure = make_subplots(rows=2, cols=1, row_heights=[0.66, 0.34], vertical_spacing=0.17)
    look = {"zmin": 0, "zmax": 2 * PALE, "colorscale": _scale(), "showscale": False, "hoverinfo": "text"}
    figure.add_heatmap(z=over_time, text=list(map(list, zip(*hover))), ygap=1, **look)
    figure.add_scatter(
        x=[0, 0],
        y=[-0.5, len(over_time) - 0.5],
        mode="lines",
        line={"color": theme.INK, "width": 2},
        hoverinfo="skip",
    )
    figure.add_trace(_grid(states[0], hover[0], across, look), row=2, col=1)
    figure.frames = [
        go.Frame(
            name=str(step),
            traces=[1, 2],
            data=[{"type": "scatter", "x": [step, step]}, _grid(state, hover[step], across, {})],
            layout={"annotations": [_note(said(trace, step))]},
        )
        for step, state in enumerate(states)
    ]
    still = {"frame": {"duration": 0, "redraw": True}, "mode": "immediate", "transition": {"duration": 0}}
    play = {**still, "frame": {"duration": MS, "redraw": True}, "fromcurrent": True}
    steps = [{"label": str(i), "method": "animate", "args": [[str(i)], still]} for i in range(trace.step)]
    buttons = [
        {"label": "play", "method": "animate", "args": [None, play]},
        {"label": "pause", "method": "animate", "args": [[None], still]},
    ]
    figure.update_layout(
        template=theme.PLOTLY, title={"text": escape(title)}, height=640, showlegend=False,
        margin={"l": 90, "r": 20, "t": 60, "b": 110}, annotations=[_note(said(trace, 0))],
        sliders=[{"steps": steps, "y": -0.08, "x": 0.24, "len": 0.76, "currentvalue": {"prefix": "model step "}}],
        updatemenus=[{"type": "buttons", "direction": "left", "buttons": buttons, "x": 0, "y": -0.12,
                      "xanchor": "left", "yanchor": "top", "showactive": False}],
    )  # fmt: skip
    figure.update_xaxes(title={"text": "model step"}, range=[-0.5, trace.step - 0.5], row=1, col=1)
    figure.update_yaxes(title={"text": f"cell of {CELL} slots"}, showgrid=False, row=1, col=1)
    figure.update_xaxes(visible=False, row=2, col=1)
    figure.update_yaxes(visible=False, autorange="reversed", row=2, col=1)
    return figure


def _grid(state: list[dict], hover: list[str], across: int, look: dict) -> go.Heatmap:
    def rows(values):
        return [list(values[i : i + across]) for i in range(0, len(values), across)]

    words = [c["text"] for c in state]
    return go.Heatmap(z=rows([_number(c) for c in state]), text=rows(words), customdata=rows(hover), xgap=3, ygap=3,
                      texttemplate="%{text}", hovertemplate="%{customdata}<extra></extra>",
                      **{k: v for k, v in look.items() if k != "hoverinfo"})  # fmt: skip


def _number(cell: dict) -> float | None:
    if cell["state"] == "free":
        return None
    return cell["group"] + 0.5 + (0 if cell["full"] else PALE)


def _hover(cell: dict, owner: dict, step: int) -> str:
    if cell["state"] == "free":
        return f"step {step}: free"
    kind = ("full" if cell["full"] else "not full yet") + (", written in this step" if cell["state"] == "new" else "")
    who = f"shared by {cell['text'][1:]}" if owner[cell["group"]] == "shared" else f"r{cell['text']}"
    return f"step {step}: {who}, {kind}"


def _scale() -> list[list]:
    """A step for each number: full colours, then pale ones."""
    shades = [theme.slot_fill(state, g) for state in ("held", "reserved") for g in range(PALE)]
    return [[(i + side) / len(shades), shade] for i, shade in enumerate(shades) for side in (0, 1)]


def _note(words: str) -> dict:
    return {"text": escape(words), "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left",
            "yanchor": "top", "yshift": -4, "showarrow": False, "font": {"size": 13}}  # fmt: skip
