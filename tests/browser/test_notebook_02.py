"""Notebook 02 in JupyterLab: its explorer's sliders move the numbers, and nothing fails on the way."""

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = "solutions/02_memory_formula.ipynb"


@pytest.mark.timeout(900)
def test_the_memory_explorer_follows_its_sliders(run_notebook, push_every_slider, tracebacks):
    page = run_notebook(NOTEBOOK)
    labels = push_every_slider(page)
    assert len(labels) == 3, "the explorer has two sliders: length and batch"
    assert len(set(labels)) == 3 and all("GiB" in label for label in labels), labels
    assert tracebacks(page) == []
