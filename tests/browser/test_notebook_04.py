"""Notebook 04 in JupyterLab: the ring's sliders move tokens through its slots, and nothing fails on the way."""

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "solutions" / "04_sliding_window.ipynb"


@pytest.mark.timeout(900)
def test_the_ring_follows_its_sliders(lab, run_notebook, push_every_slider):
    shutil.copy(NOTEBOOK, lab[1])  # a copy: the run must not touch the saved one
    page = run_notebook(NOTEBOOK.name)
    labels = push_every_slider(page)
    assert len(labels) == 4, "the explorer has three sliders: the token, the window, the sinks"
    assert [label.split(":")[0] for label in labels] == [
        "Window 6, sinks 2",
        "Window 6, sinks 2",
        "Window 7, sinks 2",
        "Window 7, sinks 3",
    ]
    assert "token 11 arrives" in labels[0] and "token 12 arrives" in labels[1], labels
    errors = page.locator(
        ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']", has_text="Traceback"
    )
    assert errors.all_inner_texts() == []
