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


def save(path, code):
    nb = new_notebook(cells=[new_code_cell(code, id="only")])
    nb.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbclean.write(nb, path)


def test_a_run_leaves_the_explorers_picture_and_no_widget(tmp_path):
    path = tmp_path / "n.ipynb"
    save(path, EXPLORER)
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
