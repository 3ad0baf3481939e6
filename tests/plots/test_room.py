"""The explorer of out-of-memory errors: every stop draws, and its verdict is the calculator's."""

import pytest

from kvlab.memory.capacity import fits
from kvlab.plots.room import RoomExplorer


def test_every_control_moves_and_says_numbers():
    explorer = RoomExplorer(("this machine", 8 * 2**30), note="a machine")
    steps = list(explorer.sweep())
    assert {s.control for s in steps} == {"length", "batch", "model", "kv_dtype", "room", "all"}
    assert all(any(c.isdigit() for c in label) for s in steps for label in s.labels)


@pytest.mark.parametrize("batch, length", [(1, 128), (4, 2048), (16, 4096), (128, 32768)])
@pytest.mark.parametrize("kv_dtype", ["fp16", "fp8", "fp32"])
def test_the_verdict_agrees_with_the_calculator(batch, length, kv_dtype):
    room = 16 * 2**30
    explorer = RoomExplorer(("here", room))
    explorer.set(batch=batch, length=length, kv_dtype=kv_dtype)
    sentence = explorer.snapshot().sentence
    assert sentence.startswith("It fits.") == bool(fits("llama-7b", room, batch, length, kv_dtype=kv_dtype))


def test_weights_alone_can_be_too_large():
    explorer = RoomExplorer(("a small machine", 2**30))
    assert "the weights alone do not fit" in explorer.snapshot().sentence
    explorer.set(model="smollm2-135m", batch=1)
    assert explorer.snapshot().sentence.startswith("It fits.")
