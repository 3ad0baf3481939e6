"""Notebook 06 in JupyterLab: the sliders of heads, latent and layers move bytes and texts; nothing fails on the way."""

from pathlib import Path

import nbformat
import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "solutions" / "06_fewer_keys_and_values.ipynb"


@pytest.mark.timeout(900)
def test_the_sharing_explorer_follows_its_sliders(lab, run_notebook, push_every_slider):
    nb = nbformat.read(NOTEBOOK, 4)
    last = next(i for i, cell in enumerate(nb.cells) if "SharingExplorer()" in cell.source)
    nb.cells = nb.cells[: last + 1]  # the explorer's own cells; test-notebooks runs all of them
    nbformat.write(nb, lab[1] / NOTEBOOK.name)
    page = run_notebook(NOTEBOOK.name)
    labels = push_every_slider(page)
    assert len(labels) == 4, "the explorer has three sliders: KV heads, latent rank, layers that share"
    assert len(set(labels)) == 4 and all("Bytes a token" in label and "KiB" in label for label in labels), labels
    errors = page.locator(
        ".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']", has_text="Traceback"
    )
    assert errors.all_inner_texts() == []
