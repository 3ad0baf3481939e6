"""nbtools.run on a real kernel: what it saves may be committed; a notebook with an error is left as it was."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from kvlab import nbclean, nbtools

EXPLORER = """\
from kvlab.measure import about
from kvlab.plots.explorer import Explorer, slider

print(about())
Explorer(
    {"n": slider("n", [1, 2, 3], 2, "how many")},
    data=lambda v: {"kind": "slots", "title": "n", "rows": [{"label": "a", "cells": [{"state": "held"}] * v["n"]}]},
)"""


PLOTLY = """\
from kvlab.measure import about
from kvlab.plots import figures
from kvlab.plots.interactive import plotly_lines, show_plotly

print(about())
lines = {"kind": "lines", "title": "n", "x": {"label": "n"}, "y": {"label": "n"}}
lines["series"] = [{"label": "n", "x": [1, 2, 3], "y": [1, 2, 3]}]
show_plotly(plotly_lines(lines), figures.draw(lines))"""


def save(path, code):
    nb = new_notebook(cells=[new_code_cell(code, id="only")])
    nb.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbclean.write(nb, path)


@pytest.mark.parametrize("code", [EXPLORER, PLOTLY], ids=["explorer", "plotly"])
def test_a_run_leaves_the_picture_and_neither_widget_nor_script(tmp_path, code):
    path = tmp_path / "n.ipynb"
    save(path, code)
    nbtools.run(path)
    assert nbclean.problems(path) == []
    assert "image/png" in nbformat.read(path, 4).cells[0].outputs[-1].data


@pytest.mark.parametrize("code", ["1 / 0", "import ipywidgets\nwith ipywidgets.Output():\n    1 / 0"])
def test_a_failed_run_saves_nothing(tmp_path, code):
    path = tmp_path / "n.ipynb"
    save(path, code)
    before = path.read_bytes()
    with pytest.raises((CellExecutionError, RuntimeError), match="division by zero"):
        nbtools.run(path)
    assert path.read_bytes() == before
