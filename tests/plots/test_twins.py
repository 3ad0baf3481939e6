"""SVG, matplotlib and plotly draw one dict: the same numbers, named alike, readable without eyes."""

import base64
import copy
import io
import json
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from sample_pictures import ALL, BARS, HEATMAP, LINES, SLOTS

from kvlab.plots import charts, data, figures, interactive, theme
from kvlab.plots.scale import scale_for

SVG = "{http://www.w3.org/2000/svg}"


def svgs(picture):
    root = ET.fromstring(charts.draw(picture))  # well-formed, or this raises
    return [root] if root.tag == SVG + "svg" else list(root.iter(SVG + "svg"))


@pytest.mark.parametrize("kind", ALL)
def test_svg_is_well_formed_and_says_its_numbers(kind):
    pictures = svgs(ALL[kind])
    assert len(pictures) == (3 if kind == "panels" else 1)
    for svg in pictures:
        assert svg.get("role") == "img" and svg.get("viewBox") and "width:100%" in svg.get("style")
        assert any(c.isdigit() for c in svg.get("aria-label"))
        assert not [e.tag for e in svg.iter() if e.tag in (SVG + "script", SVG + "style")]
    assert data.describe(ALL[kind]) == " ".join(svg.get("aria-label") for svg in pictures)


def test_the_words_hold_every_bar_and_both_ends_of_a_line():
    words = data.describe(BARS)
    for part in ("16 GiB", "12 GiB", "4 GiB", "12.5 GiB", "512 MiB", "growing cache did not fit", "15 GiB"):
        assert part in words
    words = data.describe(LINES)
    for part in ("20 ms at 16 tokens", "4 min 0 s at 4,096 tokens", "did not fit at 16,384 tokens", "slope 1.90"):
        assert part in words
    assert "5.5 s at 4,096 tokens" in data.describe({**LINES, "at": 4000})
    assert "17 (new)" in data.describe(SLOTS) and "3 (evicted)" in data.describe(SLOTS)


def test_named_points_carry_their_names_everywhere():
    series = {"variant": "full", "x": [16, 32, 64], "y": [1.0, None, 4.0], "names": ["int8", "lost", "<int2>"]}
    picture = {**LINES, "series": [series], "limits": []}
    words = data.describe(picture)
    assert "int8 1 s at 16 tokens, <int2> 4 s at 64 tokens" in words and "lost" not in words
    (svg,) = svgs(picture)
    written = [t.text for t in svg.iter(SVG + "text")]
    assert "int8" in written and "<int2>" in written and "lost" not in written
    drawn = [t.get_text() for t in figures.draw(picture).axes[0].texts]
    assert "int8" in drawn and "<int2>" in drawn and "lost" not in drawn
    assert interactive.plotly_lines(picture).data[0].text == ("int8 1 s at 16 tokens", "<int2> 4 s at 64 tokens")
    with pytest.raises(ValueError, match="3 x but 2 names"):
        data.check({**picture, "series": [{**series, "names": ["a", "b"]}]})


def test_a_mark_stands_at_its_x_everywhere():
    picture = {**LINES, "marks": [{"label": "the window", "value": 64}, {"label": "the <reach>", "value": 65536}]}
    assert "mark: the window at 64 tokens; mark: the <reach> at 65,536 tokens" in data.describe(picture)
    (svg,) = svgs(picture)
    assert {"the window", "the <reach>"} <= {t.text for t in svg.iter(SVG + "text")}
    ax = figures.draw(picture).axes[0]
    assert {"the window", "the <reach>"} <= {t.get_text() for t in ax.texts}
    assert {64, 65536} <= {line.get_xdata()[0] for line in ax.get_lines()} and ax.get_xlim()[1] > 65536
    assert [shape.x0 for shape in interactive.plotly_lines(picture).layout.shapes if shape.x0 == shape.x1] == [
        64,
        65536,
    ]


def test_a_legend_may_call_states_otherwise():
    picture = {**SLOTS, "states": {"new": "yours"}}
    (svg,) = svgs(picture)
    for written in (
        [t.text for t in svg.iter(SVG + "text")],
        [t.get_text() for t in figures.draw(picture).axes[0].texts],
    ):
        assert "yours" in written and data.STATES["sink"] in written and data.STATES["new"] not in written


def test_in_a_panel_the_rows_of_a_heat_map_fill_its_height():
    many = {**HEATMAP, "values": [[0.5] * 64] * 20, "rows": [], "columns": []}
    heights = []
    for picture in (many, {"kind": "panels", "panels": [many, many, many]}):
        box = [r for r in svgs(picture)[0].iter(SVG + "rect") if r.get("fill") == "none"]
        heights.append(float(box[0].get("height")))
    assert heights[1] > 300 and heights[0] < 300


def test_everything_is_escaped():
    svg = charts.draw(LINES)
    assert "<b>" not in svg and "Time &lt;b&gt;&amp;" in svg and "&lt;4&gt;" in charts.draw(SLOTS)


def test_hollow_means_sampled_and_a_cross_means_did_not_fit():
    (svg,) = svgs(LINES)
    hollow = [e.find(SVG + "title").text for e in svg.iter(SVG + "circle") if e.get("fill") == theme.PAPER]
    assert hollow == ["no cache: 4 min 0 s at 4,096, sampled"]
    titles = [t.text for t in svg.iter(SVG + "title")]
    assert titles.count("no cache: did not fit at 16,384") == 1


def test_lines_twins_have_the_same_points_and_names():
    ax = figures.draw(LINES).axes[0]
    lines = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
    traces = {t.name: t for t in interactive.plotly_lines(LINES).data if "lines" in t.mode}
    (svg,) = svgs(LINES)
    paths = [p.get("d") for p in svg.iter(SVG + "path") if p.get("fill") == "none" and p.get("stroke-width") == "2.4"]
    assert [n.replace("\n", " ") for n in lines] == list(traces) == ["no cache", "full cache", 'window "64"']
    assert len(paths) == 3
    xs = scale_for(LINES["series"][0]["x"], LINES["x"])
    corners = []
    for series, line, trace, path in zip(LINES["series"], lines.values(), traces.values(), paths, strict=True):
        want = [(x, y) for x, y, _ in data.finished(series)]
        assert list(zip(*line.get_data(), strict=True)) == list(zip(trace.x, trace.y, strict=True)) == want
        assert line.get_color() == trace.line.color == theme.style(series["variant"]).color
        drawn = [tuple(map(float, p.split())) for p in path[1:].split("L")]
        corners += [(x, y, *d) for (x, y), d in zip(want, drawn, strict=True)]
    for values, places in ((0, 2), (1, 3)):  # an affine map takes log x to the sheet, and log y: one for all series
        u, v = np.log([c[values] for c in corners]), [c[places] for c in corners]
        assert np.abs(np.polyval(np.polyfit(u, v, 1), u) - v).max() < 0.11  # written with one decimal
    assert xs.kind == "log2" and ax.get_xscale() == "log"


def test_bars_twins_have_the_same_widths():
    boxes = [p.get_width() for p in figures.draw(BARS).axes[0].patches if p.get_height() == pytest.approx(0.64)]
    want = [v for b in BARS["bars"] for v in b["values"] or ()]
    assert boxes == want
    (svg,) = svgs(BARS)
    wide = [float(r.get("width")) for r in svg.iter(SVG + "rect") if r.find(SVG + "title") is not None]
    assert np.allclose(np.array(wide) / wide[0], np.array(want) / want[0], atol=2e-3)


def test_heat_maps_twins_have_the_same_cells():
    (svg,) = svgs(HEATMAP)
    cells = sum(p.get("d").count("M") for p in svg.iter(SVG + "path"))
    image = figures.draw(HEATMAP).axes[0].images[0].get_array()
    assert cells == 5 == np.isfinite(image).sum() and np.nanmax(image) == 1.0


@pytest.mark.parametrize("kind", ALL)
def test_the_png_twin_is_small_and_carries_its_words(kind):
    picture = figures.draw(ALL[kind])
    bundle, metadata = picture._repr_mimebundle_()
    raw = base64.b64decode(bundle["image/png"])
    image = Image.open(io.BytesIO(raw)).convert("RGB")
    assert image.width >= 1000 and len(raw) < 60_000
    assert image.getpixel((0, 0)) == (255, 255, 255)  # opaque white: readable on a dark theme
    assert len(image.getcolors(1 << 20)) > 10  # and something is on it
    assert bundle["text/plain"] == metadata["alt"] == picture.alt and any(c.isdigit() for c in picture.alt)


def test_plotly_gets_lists_and_shows_what_did_not_fit():
    figure = interactive.plotly_lines(LINES)
    text = figure.to_json()
    assert "bdata" not in text
    assert [t.hovertemplate for t in figure.data if "lines" not in t.mode] == ["did not fit"]
    assert figure.data[0].marker.symbol == ("circle", "circle", "circle-open")
    with pytest.raises(ValueError, match="'bars'"):
        interactive.plotly_lines(BARS)


def test_show_plotly_is_one_output_with_its_twin(monkeypatch):
    import IPython.display

    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda *a, **k: shown.append((a, k)))
    interactive.show_plotly(interactive.plotly_lines(LINES), figures.draw(LINES))
    (((bundle,), options),) = shown
    assert set(bundle) == {interactive.TWIN_MIME, "text/plain", interactive.PLOTLY_MIME}
    json.dumps(bundle)
    assert options["raw"] and "alt" in options["metadata"]


@pytest.mark.parametrize("damage, words", [
    (lambda d: d.update(kind="pie"), "'pie'"),
    (lambda d: d.pop("series"), "also needs series"),
    (lambda d: d["series"][0]["y"].pop(), "4 x but 3 y"),
    (lambda d: d["series"][0].update(variant="ring"), "'ring' has no style"),
])  # fmt: skip
def test_damaged_pictures_are_refused_by_all(damage, words):
    picture = copy.deepcopy(LINES)
    damage(picture)
    for draw in (charts.draw, figures.draw, interactive.plotly_lines):
        with pytest.raises(ValueError, match=words):
            draw(picture)


def test_empty_pictures_are_drawn():
    nothing = {**LINES, "series": [{"variant": "none", "x": [16], "y": [None]}], "limits": []}
    for picture in (
        nothing,
        {**LINES, "series": []},
        {**BARS, "bars": []},
        {**HEATMAP, "values": []},
        {**SLOTS, "rows": []},
    ):
        assert svgs(picture) and figures.draw(picture).png()


def test_how_long_a_drawing_takes(capsys):
    for kind, picture in ALL.items():
        start = time.perf_counter()
        size = len(charts.draw(picture))
        with capsys.disabled():
            print(f"\n  {kind}: {1e3 * (time.perf_counter() - start):.1f} ms, {size:,} characters", end="")
        assert size < 100_000
