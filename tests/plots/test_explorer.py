"""Explorers: every stop of every control, errors that cannot hide, and what a saved notebook keeps."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import ipywidgets as widgets
import pytest
from sample_pictures import BARS
from sweeping import swept

from kvlab.config import ModelConfig
from kvlab.plots import explorers, memory
from kvlab.plots.explorer import WIDGET_VIEW, Explorer, choice, slider


def area(values):
    if values["n"] == 7:
        raise ValueError("n = 7 is <odd>")
    return {**BARS, "title": f"n is {values['n']}", "sentence": f"Now {values['n']}."}


def toy(**kw):
    controls = {
        "n": widgets.IntSlider(4, 1, 9),
        "wide": widgets.Checkbox(False),
        "unit": choice("unit", [("bytes", "B"), ("nothing", "")], "B", "a tip"),
    }
    return Explorer(controls, data=area, **kw)


ALL = [explorers.CostExplorer, memory.MemoryExplorer]


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_every_stop_of_every_control_draws(kind, capsys):
    explorer = kind(strict=False)
    before, shown = explorer.values, swept(explorer, capsys)
    assert explorer.values == before and explorer.last_error is None
    for name in explorer.by_name:  # a control that changes nothing on the picture is a mistake
        assert len(shown[name]) > 1, name


@pytest.mark.parametrize("kind", ALL, ids=lambda k: k.__name__)
def test_snapshot_is_the_twin_at_the_same_values(kind):
    explorer = kind()
    picture = explorer.snapshot()
    assert picture.alt.startswith(" ".join(explorer.labels)) and picture.sentence in picture.alt
    other = explorer.snapshot(length=1024)
    assert "1,024" in other.alt and explorer.values["length"] != 1024
    assert picture.png()[:4] == b"\x89PNG"


def test_it_draws_when_made_and_when_a_control_moves():
    explorer = toy()
    assert "n is 4" in explorer.labels[0] and "Now 4." in explorer.html.value
    explorer.by_name["n"].value = 5
    assert "n is 5" in explorer.labels[0]
    assert explorer.values == {"n": 5, "wide": False, "unit": "B"}


def test_set_draws_once():
    explorer, drawn = toy(), []
    explorer.data = lambda values: drawn.append(dict(values)) or area(values)
    explorer.set(n=9, wide=True)
    assert drawn == [{"n": 9, "wide": True, "unit": "B"}]


@pytest.mark.parametrize("values, words", [({"m": 1}, "no control 'm'"), ({"wide": True, "n": 10}, "from 1 to 9"),
                                           ({"n": 2, "unit": "s"}, "not on its control")])  # fmt: skip
def test_set_refuses_and_moves_nothing(values, words):
    explorer = toy()
    with pytest.raises(ValueError, match=words):
        explorer.set(**values)
    assert explorer.values == {"n": 4, "wide": False, "unit": "B"}


def test_an_error_is_shown_in_place_kept_and_forgotten():
    explorer = toy(strict=False)
    explorer.by_name["n"].value = 7
    alert = ET.fromstring(explorer.html.value)
    assert alert.get("role") == "alert" and alert.get("data-error") == "ValueError"
    assert "n = 7 is <odd>" in "".join(alert.itertext()) and explorer.labels == []
    assert str(explorer.last_error) == "n = 7 is <odd>"
    explorer.by_name["n"].value = 8
    assert explorer.last_error is None and "n is 8" in explorer.labels[0]


def test_an_error_at_the_start_fails_the_cell():
    with pytest.raises(ValueError, match="odd"):
        Explorer({"n": widgets.IntSlider(7, 1, 9)}, data=area)


def test_an_error_of_the_twin_fails_the_cell_too():
    with pytest.raises(ValueError):  # matplotlib cannot set this formula; the SVG would show it as it stands
        Explorer({"n": widgets.IntSlider(4, 1, 9)}, data=lambda values: {**BARS, "title": r"$\nonsense{$"})


def test_strict_raises():
    explorer = toy(strict=True)
    with pytest.raises(ValueError, match="odd"):
        explorer.by_name["n"].value = 7
    assert isinstance(explorer.last_error, ValueError)


def test_strict_by_environment(monkeypatch):
    monkeypatch.setenv("KVLAB_STRICT", "1")
    assert toy().strict and not toy(strict=False).strict
    monkeypatch.setenv("KVLAB_STRICT", "0")
    assert not toy().strict


def test_a_sweep_raises_even_where_a_reader_would_see_text():
    explorer = toy(strict=False)
    explorer.by_name["n"].max = 13  # the middle is 7
    with pytest.raises(ValueError, match="odd"):
        list(explorer.sweep())
    assert not explorer.strict and explorer.values["n"] == 4


def test_sweep_stops_at_minimum_middle_maximum_and_every_option():
    controls = {
        "i": widgets.IntSlider(2, 0, 10),
        "f": widgets.FloatSlider(0.5, min=0, max=1),
        "log": widgets.FloatLogSlider(10.0, base=10, min=0, max=2),
        "span": widgets.IntRangeSlider(value=(2, 3), min=0, max=5),
        "mapped": widgets.Dropdown(options={"a": 1, "b": 2}),
        "text": widgets.Text("x"),
    }
    explorer = Explorer(controls, data=lambda v: BARS)
    seen = {}
    for step in explorer.sweep():
        seen.setdefault(step.control, []).append(step.value)
    assert seen.pop("all") == ["minimum", "maximum"]
    assert seen == {"i": [0, 5, 10], "f": [0.0, 0.5, 1.0], "log": [1.0, 10.0, 100.0], "span": [(0, 0), (0, 5), (5, 5)],
                    "mapped": [1, 2], "text": ["x"]}  # fmt: skip


def test_one_output_holds_the_widget_and_the_picture():
    explorer = toy()
    explorer.set(n=6)
    bundle, metadata = explorer._repr_mimebundle_()
    assert {"image/png", "text/plain"} <= set(bundle) <= {"image/png", "text/plain", WIDGET_VIEW}
    assert "n is 6" in bundle["text/plain"] and metadata["alt"] == bundle["text/plain"]
    if widgets.__version__ >= "8":  # ipywidgets 7 has no model outside a kernel
        assert bundle[WIDGET_VIEW]["model_id"] == explorer.widget.model_id


def test_controls_have_labels_units_and_tips():
    for kind in ALL:
        for name, control in kind().by_name.items():
            assert control.description, name
            assert getattr(control, "tooltip", None) or control.description_tooltip, name
    length = slider("length", [512, 1024], 512, "tip", "tokens")
    assert length.description == "length (tokens)" and length.options[1] == ("1,024", 1024)
    assert slider("room", [2**30], 2**30, "tip", "B").options[0] == ("1 GiB", 2**30)


def test_measured_points_lie_over_the_prediction():
    counted = [
        {"variant": "full", "label": "full, counted", "x": [16, 64], "y": [1e10, 5e10], "sampled": [False, True]},
        {"variant": "sliding", "label": "window 64, counted", "x": [16], "y": [1e10], "window": 64},
    ]
    model = ModelConfig(hidden_size=64, num_hidden_layers=2)
    explorer = explorers.CostExplorer(model, measured={"everything": counted}, note="CPU")
    assert set(explorer.by_name) == {"length", "window", "term"} and "CPU" in explorer.html.value
    assert "full, counted" in explorer.labels[0] and "window 64, counted" not in explorer.labels[0]
    assert "window 64, counted" in explorer.set(window=64).labels[0]
    assert "counted" not in explorer.set(term="attention only").labels[0]
    with pytest.raises(ValueError, match="config"):
        explorers.CostExplorer(measured={"everything": counted})


def test_a_control_without_a_value_is_refused():
    with pytest.raises(TypeError, match="'go' is a Button"):
        Explorer({"go": widgets.Button()}, data=lambda v: BARS)


def test_importing_the_explorer_class_leaves_pyplot_and_torch_alone():
    code = "import sys, kvlab.plots.explorer; sys.exit(bool({'matplotlib.pyplot', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "MPLBACKEND": "Agg"}).returncode == 0
