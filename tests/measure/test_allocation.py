"""The memory meter against closed forms: bytes that anybody can work out by hand."""

import gc
import sys
import tracemalloc

import numpy as np
import pytest
import torch

from kvlab.measure import live_tensors_bytes, memory
from kvlab.measure.allocation import Event

KB = 1000  # bytes of 250 float32


def block(n=1, **kwargs):
    return torch.zeros(250 * n, **kwargs)


def test_tracemalloc_does_not_see_a_tensor_and_the_meter_does():
    with memory():  # the first use of a dispatch mode imports much of torch, which tracemalloc does see
        block()
    tracemalloc.start()
    with memory() as m:
        big = torch.zeros(5_000_000)
    seen = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert m.live == big.numel() * 4 and seen < m.live / 100


def test_growing_by_cat_peaks_at_old_plus_new():
    steps = 6
    with memory() as m:
        kept = block()
        for _ in range(steps):
            kept = torch.cat([kept, block()])
    assert m.live == (steps + 1) * KB
    # the last cat: old (steps), new token (1) and the result (steps + 1) at once
    assert m.peak == (steps + 1 + steps + 1) * KB


def test_a_preallocated_buffer_is_flat():
    with memory() as m:
        kept = block(100)
        for i in range(20):
            kept[i].fill_(i)
            kept.mul_(1.0)
    assert m.live == m.peak == 100 * KB
    assert [event.live for event in m.timeline if event.op != "free"][0] == 100 * KB


def test_views_count_once_and_pin_their_storage():
    with memory() as m:
        whole = block(32)
        view = whole[:80].view(8, 10).t()[1:]
        del whole
    assert view.numel() * 4 < KB
    assert m.live == m.peak == 32 * KB
    assert live_tensors_bytes(view) == 32 * KB  # lesson: clone what you keep, or the rest stays


def test_del_frees_and_the_timeline_says_when():
    with memory() as m:
        a = block(3)
        b = block(2)
        del a
    assert (m.live, m.peak) == (2 * KB, 5 * KB)
    assert m.timeline == [Event(1, "zeros", 3 * KB), Event(2, "zeros", 5 * KB), Event(2, "free", 2 * KB)]
    assert b.numel() == 500


def test_a_tensor_made_before_the_block_is_missed_when_it_dies_inside():
    old = block(5)
    with memory(of=[old]) as m:
        old = torch.cat([old, block()])
    assert (m.start, m.live, m.peak) == (5 * KB, 1 * KB, 7 * KB)

    seen = block(5)
    with memory() as m:  # not named in `of`, but an operation saw it
        grown = torch.cat([seen, block()])
        del seen
    assert (m.start, m.live) == (0, 1 * KB) and grown.numel() == 1500


def test_autograd_keeps_every_step_and_no_grad_keeps_one():
    """A generation loop without no_grad: the graph holds what each step made."""

    def run():
        x = torch.ones(250, requires_grad=True)
        with memory() as m:
            y = x.exp()
            for _ in range(9):
                y = y.exp()  # exp saves its result for the backward pass
        return m, y

    kept, y = run()
    assert kept.live == 10 * KB and y.grad_fn is not None
    with torch.no_grad():
        freed, _ = run()
    assert (freed.live, freed.peak) == (1 * KB, 2 * KB)


def test_backward_frees_the_graph():
    x = torch.ones(250, requires_grad=True)
    with memory() as m:
        y = x.exp().exp().sum()
        before = m.live
        y.backward()
        del y
    assert before == 2 * KB + 4
    assert m.live == 1 * KB  # x.grad


@pytest.mark.parametrize("grad_mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_attention_is_seen_alike_in_every_grad_mode(grad_mode):
    """The explicit path makes scores and weights of T x S; the peak must show them, whatever autograd does."""
    with grad_mode():
        q, k, v = (torch.randn(1, 2, n, 8) for n in (16, 64, 64))
        with memory() as m:
            y = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
    scores = 2 * 16 * 64 * 4
    assert (m.live, m.peak) == (y.numel() * 4, 2 * scores)


def test_fused_attention_returns_far_less_than_its_scores():
    with torch.no_grad():
        q, k, v = (torch.randn(1, 2, n, 8) for n in (16, 512, 512))
        with memory() as m:
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert y.numel() * 4 <= m.peak < 2 * 16 * 512 * 4


def test_tensors_from_data_and_from_numpy():
    with memory() as m:
        a = torch.tensor([1.0] * 250)
    assert m.live == KB and a.numel() == 250
    with memory() as m:  # numpy allocated it; a tensor holds it now
        b = torch.from_numpy(np.zeros(250))
    assert m.live == 2 * KB and b.numel() == 250


def test_resizing_in_place_is_a_change():
    with memory() as m:
        a = block()
        a.resize_(1000)
        a.untyped_storage().resize_(400)
        a.set_()
    assert m.peak == 4 * KB and m.live == 0


def test_a_reference_cycle_is_garbage_not_memory():
    gc.disable()
    try:
        with memory() as m:
            loop = [block()]
            loop.append(loop)
            del loop
        assert m.live == 0 and m.peak == KB
    finally:
        gc.enable()


def test_blocks_nest_and_an_exception_leaves_the_figures():
    with memory() as outer:
        a = block()
        with memory() as inner:
            b = block(2)
        with pytest.raises(ZeroDivisionError), memory() as broken:
            c = block(3)
            del c
            raise ZeroDivisionError
    assert (outer.live, inner.live, inner.peak, broken.live, broken.peak) == (3 * KB, 2 * KB, 2 * KB, 0, 3 * KB)
    assert outer.peak == 6 * KB and a.numel() + b.numel() == 750
    d = block(9)
    assert outer.live == 3 * KB and d.numel() == 2250  # a closed meter stands still


def test_the_meter_keeps_nothing_alive():
    a = block(4)
    with memory(of=[a]) as m:
        del a
        assert m.live == -4 * KB
    b = block()
    assert sys.getrefcount(b) == 2 and m.live == -4 * KB


def test_a_model_too_large_to_hold_is_measured_on_meta():
    with memory("meta") as m:
        weights = torch.empty(1_000_000, 1_000_000, device="meta", dtype=torch.float16)
        host = torch.empty(10)
    assert m.live == 2 * 10**12 and weights.device.type == "meta" and host.numel() == 10


def test_live_tensors_bytes_of_modules_caches_and_containers():
    class Cache:
        __slots__ = ("keys", "more")

        def __init__(self):
            self.keys = [block(1), block(2)]
            self.more = {"v": self.keys[1][:10], "self": self}

    cache = Cache()
    assert live_tensors_bytes(cache) == live_tensors_bytes(cache, cache.keys) == 3 * KB
    layer = torch.nn.Linear(10, 10)
    tied = torch.nn.Sequential(layer, layer)
    tied.register_buffer("mask", torch.zeros(10, dtype=torch.bool))
    assert live_tensors_bytes(tied) == 4 * (100 + 10) + 10
    assert live_tensors_bytes(torch.zeros(4, dtype=torch.int8), None, "text", 3) == 4
    assert live_tensors_bytes(cache, device="meta") == 0 == live_tensors_bytes()


def test_a_device_that_is_not_there_is_refused():
    missing = "cuda" if not torch.cuda.is_available() else "mps"
    with pytest.raises(ValueError, match=f"device '{missing}'"):
        memory(missing)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, whose allocator this reads")
def test_cuda_reads_the_allocator_with_the_same_meaning():
    mib = 2**20
    kept = torch.zeros(mib, dtype=torch.uint8, device="cuda")
    with memory("cuda", timeline=True) as m:
        with memory("cuda") as inner:
            kept = torch.cat([kept, torch.zeros(mib, dtype=torch.uint8, device="cuda")])
        a = torch.zeros(mib // 2, dtype=torch.uint8, device="cuda")
    assert (inner.live, inner.peak) == (mib, 3 * mib)
    assert (m.live, m.peak) == (mib + a.numel(), 3 * mib)
    assert max(event.live for event in m.timeline) == 3 * mib and m.reserved >= m.start + m.live
    with memory("cuda", counted=True) as m:
        b = torch.zeros(100, dtype=torch.uint8, device="cuda")
    assert m.live == b.numel()  # exact, where the allocator rounds up
