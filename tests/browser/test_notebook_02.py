"""Notebook 02 in JupyterLab: its explorer's sliders move the numbers, and nothing fails on the way."""

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "solutions" / "02_memory_formula.ipynb"


@pytest.mark.timeout(900)
def test_the_memory_explorer_follows_its_sliders(lab, run_notebook, push_every_slider):
    shutil.copy(NOTEBOOK, lab[1])  # a copy: the run must not touch the saved one
    page = run_notebook(NOTEBOOK.name)
    labels = push_every_slider(page)
    assert len(labels) == 3, "the explorer has two sliders: length and batch"
    assert len(set(labels)) == 3 and all("GiB" in label for label in labels), labels
    errors = page.locator(
        ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']", has_text="Traceback"
    )
    assert errors.all_inner_texts() == []
