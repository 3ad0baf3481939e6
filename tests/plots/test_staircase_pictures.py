"""The staircase's pictures, and every stop of its explorer."""

import xml.etree.ElementTree as ET

import pytest
from sweeping import swept

from kvlab.plots import charts, figures, staircase
from kvlab.staircase import Height, changes, heights

ROWS = [Height(4, 40, 45), Height(5, 50, 70), Height(6, 60, 85)]


def test_teeth_and_stairs():
    x, y = staircase.teeth(ROWS)
    assert x == [4, 4.4, 4.5, 4.6, 5.4, 5.5, 5.6, 6] and y == [40, 40, 70, 50, 50, 85, 60, 60]
    assert staircase.stairs([1, 2, 3], [5, 5, 9]) == ([1, 1.5, 1.5, 2.5, 2.5, 3], [5, 5, 5, 5, 9, 9])


def pictures():
    from kvlab.caching_allocator import replay

    played = {k: replay(changes(k, staircase.TOY, 4, 6)) for k in ("growing", "full")}
    yield staircase.measured({"growing": ROWS, "full": ROWS}, [1, 2, 3], "a machine")
    yield staircase.measured({"growing": ROWS}, labels={"growing": "DynamicCache"})
    yield staircase.events([0, 5, 3], "One step", "a machine", [2, 2, 4])
    yield staircase.reserved(played, "Reserved")
    yield staircase.moments({"fused": (5, 1), "plain": (5, 9)}, "Prefill")


@pytest.mark.parametrize("data", list(pictures()), ids=lambda d: d["title"])
def test_both_twins_draw_and_say_numbers(data):
    ET.fromstring(charts.draw(data))
    picture = figures.draw(data)
    assert any(c.isdigit() for c in picture.alt) and picture.png()[:4] == b"\x89PNG"


def test_what_was_asked_once_is_drawn_to_the_end():
    *_, data, _ = pictures()
    assert {s["x"][-1] for s in data["series"]} == {10}
    assert "Simulated" in data["note"]


def test_a_saw_is_solid_in_both_twins():
    data = staircase.measured({"growing": ROWS})
    assert "stroke-dasharray" not in charts.draw(data)
    assert "stroke-dasharray" in charts.draw({**data, "series": [{**data["series"][0], "solid": False}]})


def test_every_stop_of_the_explorer_draws_within_a_tick(capsys):
    explorer = staircase.StaircaseExplorer()
    shown = swept(explorer, capsys)
    for name in explorer.by_name:
        if name != "shown":  # at 64 tokens there is no more to show than 64
            assert len(shown[name]) > 1, name


@pytest.mark.parametrize("length, shown", [(64, 16), (1024, 1024), (32768, 256)])
def test_the_explorer_says_what_the_closed_form_says(length, shown):
    from kvlab.plots import theme

    explorer = staircase.StaircaseExplorer()
    explorer.set(length=length, shown=shown, model="llama-7b", batch=2)
    (row,) = heights("growing", staircase.SHAPES["llama-7b"][1](), [length], length, 2)
    picture = explorer.snapshot()
    assert theme.bytes_(row.peak - row.held) in picture.sentence
    assert theme.bytes_(row.peak) in picture.alt
