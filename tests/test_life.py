"""A cache's life under the meter: teeth as high as the closed form says, and CUDA's record read right."""

import os

import pytest
import torch

from kvlab import GPT, life, make_cache
from kvlab.measure import live_tensors_bytes
from kvlab.plots.staircase import TOY
from kvlab.staircase import heights

MODEL = GPT(TOY)
ONE = TOY.kv_bytes_per_token(4)


def test_growing_is_a_saw_and_the_others_are_flat():
    rows, _, _ = life.generation(MODEL, "growing", 16, 20)
    told = heights("growing", TOY, [r.tokens for r in rows], 36, itemsize=4)
    for row, form in zip(rows[1:], told[1:]):
        assert form.held <= row.held <= form.held + 4096  # the last logits
        assert form.peak <= row.peak <= form.peak + 64 * 1024  # and a step's activations
    for kind, slots, options in (("full", 36, {}), ("sliding", 12, {"window": 12}), ("paged", 48, {})):
        rows, _, _ = life.generation(MODEL, kind, 16, 20, **options)
        assert all(slots * ONE <= r.held <= slots * ONE + 4096 for r in rows), kind


def test_blocks_in_use_climb_in_steps():
    _, used, _ = life.generation(MODEL, "paged", 15, 20)
    assert used == [16 * ONE] * 2 + [32 * ONE] * 16 + [48 * ONE] * 3


def test_stages_of_a_life():
    for kind in ("growing", "full", "paged"):
        made, prompt, appended, rewound, deleted = life.stages(MODEL, kind, 16, 16, 8)
        assert made.live == 0 and deleted.live == 0, kind
        assert appended.in_use == 32 * ONE and prompt.in_use == 16 * ONE
        assert rewound.in_use == (24 if kind != "paged" else 32) * ONE  # whole blocks
        assert all(s.peak >= s.live for s in (made, prompt, appended, rewound, deleted))
        if kind == "growing":
            assert rewound.live < appended.live < rewound.peak  # giving back takes some first
        else:
            assert abs(rewound.live - appended.live) < 1024


def test_one_step_has_a_tooth_for_each_layer():
    m = life.one_step(MODEL, "growing", 64)
    layer = 64 * ONE / TOY.num_hidden_layers
    assert sum(e.op == "cat" and e.live > layer for e in m.timeline) == TOY.num_hidden_layers
    assert ONE <= m.live <= ONE + 2048 and layer < m.peak < 1.2 * layer


def test_the_meter_leaves_nothing_behind():
    cache = make_cache("growing", MODEL)
    before = live_tensors_bytes(cache)
    life.generation(MODEL, "full", 4, 2)
    assert live_tensors_bytes(cache) == before == 0


def test_transformers_caches_are_a_saw_and_a_line():
    pytest.importorskip("transformers", reason="transformers is not installed")
    dynamic, static = (life.transformers_generation(i, 16, 8, layers=2) for i in ("dynamic", "static"))
    one = ONE // 2
    assert [r.tokens for r in dynamic] == list(range(16, 25)) and len(static) == 9
    for row in dynamic[1:]:
        assert row.tokens * one <= row.held <= row.tokens * one + 8192
        assert row.peak - row.held > (row.tokens - 1) * one / 4 * 0.8  # the keys or the values of one of two layers
    assert max(r.held for r in static) - min(r.held for r in static) < 8192


def test_a_trace_of_the_recorder_is_summed():
    trace = [
        {"action": "segment_alloc", "size": 2097152},
        {"action": "alloc", "size": 512},
        {"action": "alloc", "size": 1024},
        {"action": "free_requested", "size": 512},
        {"action": "free_completed", "size": 512},
        {"action": "segment_free", "size": 2097152},
        {"action": "snapshot", "size": 0},
    ]
    tensors, segments = life.from_trace(trace)
    assert tensors == [0, 512, 1536, 1536, 1024, 1024, 1024]
    assert segments == [2097152] * 5 + [0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="need a machine without CUDA device")
def test_the_recorder_says_that_it_needs_cuda():
    with pytest.raises(RuntimeError, match="no CUDA device"):
        life.record_cuda(lambda: None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_recorder_on_cuda():
    kept = []
    tensors, segments = life.record_cuda(lambda: kept.append(torch.empty(3 * 2**20, device="cuda")))
    assert tensors[-1] >= 12 * 2**20 and len(tensors) == len(segments)


def test_quiet_drops_what_c_writes_and_gives_stderr_back(capfd):
    with life.quiet():
        os.write(2, b"noise")
    os.write(2, b"signal")
    assert capfd.readouterr().err == "signal"
