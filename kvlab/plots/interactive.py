"""The same pictures in plotly, for what a reader hovers and zooms; a saved notebook keeps the matplotlib twin's PNG.

Lists go in, never arrays: plotly 6 and later would encode an array in a way that older front-ends draw wrong or blank.
"""

from __future__ import annotations

import json
import math
import sys
from html import escape

import plotly.graph_objects as go

from . import data as pictures
from . import figures, theme
from .scale import Scale, scale_for, spread

PLOTLY_MIME = "application/vnd.plotly.v1+json"
# Beside a PNG, JupyterLab's plotly renderer shows that PNG and no figure. So the twin travels under a name that
# no front-end draws; kvlab.nbclean renames it to image/png when it takes the plotly part out of a saved notebook.
TWIN_MIME = "application/vnd.kvlab.twin.png"
HEIGHT = 480


def plotly_lines(data: dict) -> go.Figure:
    """A picture of kind "lines" (data.py) as a plotly figure: hover gives the numbers, names stand at the line ends."""
    if pictures.check(data) != "lines":
        raise ValueError(f"plotly_lines draws kind 'lines', not {data['kind']!r}")
    series, limits, unit = data["series"], data.get("limits", ()), data["y"].get("unit", "")
    marks = data.get("marks", ())
    xs = scale_for([v for s in series for v in s["x"]] + [m["value"] for m in marks], data["x"])
    ys = scale_for([v for s in series for v in s["y"]] + [m["value"] for m in limits], data["y"])
    figure = go.Figure(layout={
        "template": theme.PLOTLY, "title": {"text": data["title"]}, "height": HEIGHT, "showlegend": False,
        "xaxis": _axis(xs, data["x"], 8), "yaxis": _axis(ys, data["y"], 6), "hovermode": "closest",
    })  # fmt: skip
    ends = []
    for s in series:
        look, done, lost = theme.style(s.get("variant")), pictures.finished(s), pictures.unfinished(s)
        named = [n for n, y in zip(s.get("names") or [""] * len(s["x"]), s["y"], strict=True) if y is not None]
        said, symbol = " ".join(pictures.label(s)[0]), theme.MARKERS[look.marker][1]
        dash = ",".join(f"{d}px" for d in (pictures.dash(s, look.dash))) or "solid"
        figure.add_scatter(
            x=[x for x, _, _ in done], y=[y for _, y, _ in done], name=said, hovertemplate="%{text}",
            mode="lines+markers" if s.get("points", True) else "lines", line={"color": look.color, "dash": dash},
            marker={"symbol": [symbol + ("-open" if sampled else "") for _, _, sampled in done], "size": 9},
            text=[f"{n} {theme.number(y, unit)} at {theme.number(x, data['x'].get('unit', ''))}".strip()
                  + (", sampled" if sampled else "") for n, (x, y, sampled) in zip(named, done, strict=True)],
        )  # fmt: skip
        if lost:
            figure.add_scatter(
                x=lost, y=[ys.hi] * len(lost), mode="markers", name=said, hovertemplate="did not fit",
                marker={"symbol": "x", "size": 11, "color": look.color}, cliponaxis=False,
            )  # fmt: skip
        ends.append(done[-1][:2] if done else (xs.hi, ys.hi))
    tall = HEIGHT - 140
    heights = [tall * ys.at(y) for _, y in ends]
    for s, (x, y), at, place in zip(
        series, ends, heights, spread(heights, 17 * pictures.label_rows(series), 0, tall), strict=True
    ):
        look = theme.style(s.get("variant"))
        names, slope = pictures.label(s)
        words = f"<b>{'<br>'.join(map(escape, names))}</b>" + (f"<br>{slope}" if slope else "")
        figure.add_annotation(
            x=_place(xs, x), y=_place(ys, y), text=words,
            showarrow=False, xanchor="left", align="left",
            xshift=10, yshift=place - at, font={"color": look.text, "size": 13},
        )  # fmt: skip
    for m in limits:
        figure.add_hline(y=m["value"], line={"color": theme.ALERT, "dash": "dash"}, annotation_text=m["label"],
                         annotation_position="top left", annotation_font={"color": theme.ALERT})  # fmt: skip
    for m in marks:
        figure.add_vline(x=m["value"], line={"color": theme.MUTED, "dash": "dash"})
        figure.add_annotation(x=_place(xs, m["value"]), y=1, yref="paper", text=escape(m["label"]), showarrow=False,
                              xanchor="left", yanchor="top", font={"color": theme.MUTED})  # fmt: skip
    if data.get("note"):
        figure.add_annotation(text=data["note"], x=0, y=-0.2, xref="paper", yref="paper", showarrow=False,
                              font={"size": 11, "color": theme.MUTED})  # fmt: skip
    return figure


def show_plotly(figure: go.Figure, twin: figures.Picture) -> None:
    """Displays the plotly figure; the same output carries its twin's PNG, which a saved notebook shows in its place.

    Call it at the top level of a cell. Colab draws plotly from HTML, so there the output carries that form too.
    """
    from IPython.display import display

    bundle, metadata = twin._repr_mimebundle_()
    bundle[TWIN_MIME] = bundle.pop("image/png")
    bundle[PLOTLY_MIME] = json.loads(figure.to_json())
    if "google.colab" in sys.modules:
        bundle["text/html"] = figure.to_html(include_plotlyjs="cdn", full_html=False)
    display(bundle, raw=True, metadata=metadata)


def _axis(scale: Scale, axis: dict, most: int) -> dict:
    ticks = scale.ticks(most)
    return {
        "type": "linear" if scale.kind == "linear" else "log", "title": {"text": axis.get("label", "")},
        "range": [_place(scale, scale.lo), _place(scale, scale.hi)],
        "tickvals": [v for v, _ in ticks], "ticktext": [t for _, t in ticks],
    }  # fmt: skip


def _place(scale: Scale, value: float) -> float:
    """What plotly wants for ranges and annotations: the exponent of 10 on a log axis."""
    return value if scale.kind == "linear" else math.log10(value)
