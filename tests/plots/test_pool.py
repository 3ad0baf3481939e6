"""The pool over time: what is drawn is what the trace says, at every step, in the explorer, the film and the page."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from sweeping import swept

from kvlab import gallery
from kvlab.plots import charts, data, figures, pool, pool_page, spans, theme
from kvlab.plots.pool_film import PALE, pool_film
from kvlab.serving.trace import State

SAVED = Path(__file__).parents[2] / "figures" / "pool_explorer.html"


@pytest.mark.parametrize("kept", pool.KEPT)
def test_spans_cover_what_is_held_and_no_more(kept):
    trace = pool.recorded(kept)
    drawn, series = pool.spans(trace), trace.series()
    for step in range(trace.step):
        here = [s for s in drawn["spans"] if s["begin"] <= step < s["end"]]
        slots = [slot for s in here for slot in range(s["start"], s["start"] + s["slots"])]
        assert len(slots) == len(set(slots)) == series["slots"][step]  # no slot drawn twice
        tokens = sum(s["filled"][step - s["begin"]] for s in here)
        assert all(0 <= s["filled"][step - s["begin"]] <= s["slots"] for s in here)
        if kept != "paged, prefix shared":
            assert tokens == series["tokens"][step]
    assert {s["name"] for s in drawn["spans"]} - {"", pool.SHARED} == {f"r{i}" for i in range(12)}


def test_the_four_ways_differ_as_told():
    steps = [pool.recorded(kept).step for kept in pool.KEPT]
    assert steps == sorted(steps) and len(set(steps)) == 4  # shared, paged, doubling, reserved
    most = [int(pool.recorded(kept).series()["running"].max()) for kept in pool.KEPT]
    assert most[-1] == pool.SLOTS // pool.LONGEST == 3 < most[1]
    with pytest.raises(ValueError, match="kept='pages' is none of paged, prefix shared, "):
        pool.recorded("pages")


@pytest.mark.parametrize("kept", pool.KEPT)
def test_cells_are_the_memory_at_that_step(kept):
    trace = pool.recorded(kept)
    for step, state in enumerate(trace.replay()):
        found, written = pool.cells(trace, step), 0
        for i, cell in enumerate(found):
            first = i * pool.CELL
            ids = [r.id for r in state.running for a, n in r.pieces if a <= first < a + n]
            assert (cell["state"] == "free") == (not ids)
            if len(ids) == 1:
                assert cell["text"] == ids[0].removeprefix("r")
            elif ids:
                assert cell["text"] == f"×{len(ids)}"
            written += cell["state"] == "new"
        assert bool(written) == any(r.rate for r in state.running), step


def test_a_piece_knows_what_was_written_in_this_step():
    state = State(3)
    for r in (pool_request("a", 10, 4, [(0, 4), (8, 4), (4, 4)]), pool_request("b", 5, 1, [(0, 4), (12, 4)])):
        state.requests[r.id] = r
    assert pool.pieces(state) == {
        (0, 4): (4, 4, ["a", "b"]),
        (8, 4): (4, 2, ["a"]),  # tokens 4 to 7; 6 and 7 are new
        (4, 4): (2, 0, ["a"]),
        (12, 4): (1, 0, ["b"]),
    }


def pool_request(id, computed, rate, pieces):
    from kvlab.serving.trace import Now

    return Now(id, 1, "running", pieces, computed=computed - rate, tokens=computed, rate=rate, since=3)


def test_a_sentence_names_who_waits_and_who_is_preempted():
    trace = pool.recorded("paged, prefix shared")
    at = next(e.step for e in trace.events if e.kind == "preempted")
    gone = next(e.request for e in trace.events if e.kind == "preempted")
    words = pool.said(trace, at)
    assert words.startswith(f"Step {at}: ") and f"{gone} is preempted" in words and f"({gone}" in words


# ---- the drawing


def test_both_twins_draw_the_same_spans():
    picture = pool.spans(pool.recorded("64 slots reserved"), at=10)
    svg = ET.fromstring(charts.draw(picture))
    words = [t.text for t in svg.iter("{http://www.w3.org/2000/svg}text")]
    ax = figures.draw(picture).axes[0]
    drawn = [t.get_text() for t in ax.texts]
    assert {f"r{i}" for i in range(12)} <= set(words) and {f"r{i}" for i in range(12)} <= set(drawn)
    assert ax.get_xlim() == (0, picture["steps"]) and ax.get_ylim() == (0, 192)
    assert "step 10: 192 held" in svg.get("aria-label")
    assert "step" not in data.describe({**picture, "at": None}).split(";")[-1].replace("steps", "")


def test_the_staircase_rises_with_the_tokens():
    span = {"start": 8, "slots": 8, "begin": 2, "end": 6, "filled": [3, 4, 4, 8]}
    assert spans.outline(span) == [(2, 8), (2, 8), (2, 11), (3, 11), (3, 12), (5, 12), (5, 16), (6, 16), (6, 8)]
    with pytest.raises(ValueError, match="a span of 4 steps has 3 counts"):
        picture = pool.spans(pool.recorded("64 slots reserved"))
        data.check({**picture, "spans": [{**span, "filled": [1, 2, 3]}]})


def test_a_column_may_say_how_tall_its_pictures_are():
    trace = pool.recorded("64 slots reserved")
    panels = pool.pool_at(trace, 10, "a title")
    heights = [float(svg.get("viewBox").split()[3]) for svg in ET.fromstring(charts.draw(panels)).iter()
               if svg.tag.endswith("svg")]  # fmt: skip
    assert heights[0] / heights[1] == pytest.approx(1.7 / 0.8)
    figure = figures.draw(panels)
    figure.savefig("/dev/null", format="png")  # lays it out
    top, bottom = (ax.get_position().height for ax in figure.axes)
    assert 1.5 < top / bottom < 4


def test_pale_is_reserved_and_paper_is_free():
    assert theme.slot_fill("free", 3) == theme.PAPER
    assert theme.slot_fill("held", 3) == theme.GROUPS[3]
    assert theme.contrast(theme.slot_fill("reserved", 3)) < theme.contrast(theme.GROUPS[3])


# ---- the explorer


def test_every_stop_of_the_pool_draws_within_a_tick(capsys):
    explorer = pool.PoolExplorer()
    shown = swept(explorer, capsys)
    assert all(len(shown[name]) > 1 for name in explorer.by_name), shown


def test_play_moves_the_slider_and_the_slider_moves_play():
    explorer = pool.PoolExplorer()
    for step in (25, 26, 27):
        explorer.play.value = step
        assert explorer.values["step"] == step and f"At step {step}:" in explorer.labels[1]
    explorer.set(step=3)
    assert explorer.play.value == 3  # it goes on from where the slider stands
    explorer.set(step=explorer.play.max, kept="paged, prefix shared")
    assert "All was done after step 64." in explorer.html.value and explorer.last_error is None
    assert explorer.play in explorer.widget.children[0].children


# ---- the film and the page


def test_every_frame_of_the_film_is_a_step_of_the_trace():
    trace = pool.recorded("paged, prefix shared")
    film = pool_film(trace, "A film")
    assert [f.name for f in film.frames] == [str(i) for i in range(trace.step)]
    for step in (0, 24, trace.step - 1):
        frame, found = film.frames[step], pool.cells(trace, step)
        line, grid = frame.data
        assert list(line.x) == [step, step] and list(frame.traces) == [1, 2]
        assert [text for row in grid.text for text in row] == [c["text"] for c in found]
        for c, number in zip(found, [z for row in grid.z for z in row], strict=True):
            assert number is None if c["state"] == "free" else int(number) == c["group"] + (0 if c["full"] else PALE)
        assert frame.layout.annotations[0].text == pool.said(trace, step)
    written = json.loads(film.to_json())
    assert "bdata" not in film.to_json()  # lists, which all front-ends read
    assert [len(row) for row in written["data"][0]["z"]] == [trace.step] * 24
    assert len(written["layout"]["sliders"][0]["steps"]) == trace.step
    scale = dict(reversed(written["data"][0]["colorscale"]))
    assert scale[0] == theme.GROUPS[0] and len(scale) == 2 * PALE + 1


def test_the_saved_page_is_as_generated(tmp_path):
    assert gallery.draw("pool_explorer", tmp_path) == [tmp_path / "pool_explorer.html"]
    made = (tmp_path / "pool_explorer.html").read_text(encoding="utf-8")
    assert SAVED.read_text(encoding="utf-8") == made, "run: make figures"
    assert "{{" not in made and len(made) < 160_000
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", made)  # the name of a format, not an address to fetch
    assert not re.search(r"https?:|//cdn|<script[^>]+src|<link[^>]+stylesheet|@import|url\(|fetch\(|XMLHttp", outside)


def test_the_page_knows_every_step():
    runs = json.loads(re.search(r'id="data">(.*?)</script>', pool_page.page(), re.S)[1])
    assert list(runs) == list(pool.KEPT)
    for kept, run in runs.items():
        trace = pool.recorded(kept)
        assert len(run["frames"]) == len(run["said"]) == trace.step
        for step in (0, trace.step // 2, trace.step - 1):
            texts = [run["kinds"][i][0] for i in run["frames"][step]]
            assert texts == [c["text"] for c in pool.cells(trace, step)]
            assert run["said"][step] == pool.said(trace, step)
