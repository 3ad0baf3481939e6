"""Every cache in every dtype, without gradients; and what is alive at the peak of a step."""

import pytest
import torch
from cases import SETUPS, name_of, stored_tensors
from oracles import call, dense_logits, feed, ids_for, in_chunks, rule_of, toy

from kvlab.caches import make_cache
from kvlab.measure import memory

# what rounding alone does to these toys' logits, which reach about 3; a planted bug moves them by more than 0.01
GATE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 0.02, torch.bfloat16: 0.15}
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)


@every_setup
@pytest.mark.parametrize("dtype", GATE, ids=str)
def test_every_dtype(setup, dtype):
    kind, options = setup
    model, rows = toy(seed=2, dtype=dtype), ids_for(0, [14, 9])
    cache = make_cache(kind, model, 2, 20, **options)
    got = feed(model, cache, rows, in_chunks([14, 9], 4))
    assert cache.dtype == dtype and cache.device == torch.device("cpu")
    gate = GATE[dtype]
    if kind == "quantized" and dtype != torch.float64:  # a code near the middle may fall the other way
        gate = {8: 0.02, 4: 0.5, "fp8": 0.3}[options.get("k_bits", 8)] + 2 * gate
    for b, row in enumerate(rows):
        assert got[b].dtype == dtype and torch.isfinite(got[b]).all()
        error = (got[b].double() - dense_logits(model, row, rule_of(kind, options))).abs().max()
        assert error <= gate, f"row {b}: {error:.3g}"
    scores = torch.float32 if kind == "heavy_hitter" else dtype  # sums over the text: half a dozen bits would not do
    for x in stored_tensors(cache):
        assert x.dtype in (
            dtype,
            torch.float16,
            torch.uint8,
            torch.int32,
            torch.int64,
            torch.bool,
            torch.float64,
            scores,
        )


@every_setup
def test_no_gradient_is_kept(setup):
    """The toys' weights want gradients, and nobody says no_grad: a cache must not hold on to 50 steps of graph."""
    model = toy(seed=2)
    assert all(p.requires_grad for p in model.parameters())
    cache = make_cache(setup[0], model, 1, 20, **setup[1])
    for token in range(12):
        logits = model(torch.tensor([[token]]), cache)
    assert logits.requires_grad
    assert not any(x.requires_grad or x.grad_fn is not None for x in stored_tensors(cache))
    cache.fork()  # deepcopy fails on a tensor with a graph behind it


def test_growing_holds_old_and_new_at_its_peak_and_full_nothing_more():
    """torch.cat copies layer by layer: for a moment one layer's old keys live beside the new ones."""
    model, text = toy(seed=2), ids_for(1, [64])[0]
    one = model.config.kv_bytes_per_token(8)
    peaks = {}
    for kind in ("growing", "full"):
        for n in (16, 64):
            cache = make_cache(kind, model, 1, 128)
            feed(model, cache, [text[:n]], [[n]])
            held = cache.nbytes
            with memory("cpu", of=[cache], counted=True) as m:
                call(model, cache, [[1]], [n])
            peaks[kind, n] = m.peak
            assert cache.nbytes - held == (one + 8 if kind == "growing" else 0)
    per_layer = one // model.config.num_hidden_layers
    # 48 tokens more: the peak rises by a layer's copy of them, no less, and by little else (masks, positions)
    grown = peaks["growing", 64] - peaks["growing", 16]
    assert grown >= 48 * per_layer // 2
    assert peaks["full", 64] - peaks["full", 16] < 48 * per_layer // 2


@pytest.mark.parametrize("kind,power", [("growing", 2), ("full", 0), ("paged", 2), ("sliding", 0)])
def test_bytes_copied_over_a_generation(kind, power):
    """Quadratic where each step copies or gathers all that is held, nothing where a step writes in place."""
    model, copied = toy(seed=2), []
    for n in (32, 64):
        options = {"window": 8} if kind == "sliding" else {"block_size": 4} if kind == "paged" else {}
        cache = make_cache(kind, model, 1, 64, **options)
        feed(model, cache, ids_for(2, [n]), [[1]] * n)
        copied.append(cache.bytes_copied)
    if power == 0:
        assert copied == [0, 0]
    else:
        assert 3.6 < copied[1] / copied[0] < 4.2


def test_sliding_bytes_stop_growing_and_its_reads_are_flat():
    model = toy(seed=2)
    cache = make_cache("sliding", model, 1, window=8, sinks=2)
    seen = []
    for n in range(8 * 16):
        before = cache.bytes_read
        call(model, cache, [[n % 50]], [n])
        seen.append((cache.nbytes, cache.nbytes_in_use, cache.bytes_read - before))
    one = model.config.kv_bytes_per_token(8)
    assert set(seen[10:]) == {(10 * one, 10 * one, 10 * one)}
