"""A reader's hand: open a notebook in JupyterLab, run it, push each slider a step, read what the picture then says."""

import nbformat
import pytest

pytestmark = pytest.mark.browser

SMALLEST = """\
import ipywidgets as widgets

width, height = widgets.IntSlider(3, 1, 9), widgets.FloatSlider(2.0, min=0.5, max=2.0, step=0.5)
view = widgets.HTML()


def draw(_=None):
    label = f"area {width.value * height.value}"
    view.value = f'<svg role="img" aria-label="{label}" width="90" height="20"><rect width="50" height="9"/></svg>'


for slider in (width, height):
    slider.observe(draw, "value")
draw()
widgets.VBox([width, height, view])"""


def test_the_smallest_explorer_follows_its_sliders(lab, run_notebook, push_every_slider):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SMALLEST)])
    nb.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nb, lab[1] / "smallest.ipynb")
    page = run_notebook("smallest.ipynb")
    # 3 x 2; one step right; then the second slider, which stands at its right end, one step left
    assert push_every_slider(page) == ["area 6.0", "area 8.0", "area 6.0"]


@pytest.mark.timeout(900)
def test_notebook_01s_first_explorer_follows_its_sliders(run_notebook, push_every_slider, tracebacks):
    page = run_notebook("01_why_cache.ipynb")
    labels = push_every_slider(page)
    assert len(labels) >= 3, "the explorer has fewer than two sliders"
    assert all(any(c.isdigit() for c in label) for label in labels), labels
    assert tracebacks(page) == []
