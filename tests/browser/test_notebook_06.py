"""Notebook 06 in JupyterLab: the sliders of heads, latent and layers move bytes and texts; nothing fails on the way."""

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = "solutions/06_fewer_keys_and_values.ipynb"


@pytest.mark.timeout(900)
def test_the_sharing_explorer_follows_its_sliders(run_notebook, push_every_slider, tracebacks):
    page = run_notebook(NOTEBOOK, until="SharingExplorer()")
    labels = push_every_slider(page)
    assert len(labels) == 4, "the explorer has three sliders: KV heads, latent rank, layers that share"
    assert len(set(labels)) == 4 and all("Bytes a token" in label and "KiB" in label for label in labels), labels
    assert tracebacks(page) == []
