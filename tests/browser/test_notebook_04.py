"""Notebook 04 in JupyterLab: the ring's sliders move tokens through its slots, and nothing fails on the way."""

import pytest

pytestmark = pytest.mark.browser
NOTEBOOK = "solutions/04_sliding_window.ipynb"


@pytest.mark.timeout(900)
def test_the_ring_follows_its_sliders(run_notebook, push_every_slider, tracebacks):
    page = run_notebook(NOTEBOOK, until="RingExplorer()")
    labels = push_every_slider(page)
    assert len(labels) == 4, "the explorer has three sliders: the token, the window, the sinks"
    assert [label.split(":")[0] for label in labels] == [
        "Window 6, sinks 2",
        "Window 6, sinks 2",
        "Window 7, sinks 2",
        "Window 7, sinks 3",
    ]
    assert "token 11 arrives" in labels[0] and "token 12 arrives" in labels[1], labels
    assert tracebacks(page) == []
