"""Notebook 05 in JupyterLab: the sliders of "into the byte and back" move code, byte and number; nothing fails."""

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = "solutions/05_quantized_cache.ipynb"


@pytest.mark.timeout(900)
def test_the_byte_explorer_follows_its_sliders(run_notebook, push_every_slider, tracebacks):
    page = run_notebook(NOTEBOOK, until="ByteExplorer()")
    labels = push_every_slider(page)
    assert len(labels) == 4, "the explorer has three sliders: your number, group, outlier"
    assert len(set(labels)) == 4 and all("code: " in label and "comes back: " in label for label in labels), labels
    assert tracebacks(page) == []
