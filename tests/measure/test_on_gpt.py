"""The instruments pointed at the lab's own model and caches: counted FLOPs and bytes equal the formulas."""

import pytest
import torch

import kvlab
from kvlab.caches import adopt
from kvlab.cost import generation_flops
from kvlab.measure import count_flops, live_tensors_bytes, memory

C, H, D, FF, VOCAB, LAYERS = 32, 4, 8, 96, 50, 2
KINDS = {
    "growing": {},
    "full": {},
    "sliding": {"window": 16, "sinks": 2},
    "quantized": {"group_size": 8, "residual_length": 8},
    "paged": {"block_size": 4},
    "shared": {},
    "offloaded": {},
    "heavy_hitter": {"budget": 16},
    "random": {"budget": [[16, 9], [12, 16]]},
    "first_last": {"budget": 16},
}


def model_with(kv_heads, dtype=torch.float32, **more):
    config = kvlab.ModelConfig(
        vocab_size=VOCAB,
        hidden_size=C,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=H,
        num_key_value_heads=kv_heads,
        **more,
    )
    return kvlab.GPT(config).to(dtype)


def projections(tokens, rows_of_logits, kv_heads):
    layer = C * H * D * 2 + 2 * C * kv_heads * D + 3 * C * FF
    return 2 * (LAYERS * tokens * layer + rows_of_logits * C * VOCAB)


def attention(batch, t, s):
    return LAYERS * 4 * batch * H * t * s * D


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_prefill_and_uncached_flops(kv_heads, dtype, tied):
    model, ids = model_with(kv_heads, dtype, tie_word_embeddings=tied), torch.zeros(3, 11, dtype=torch.long)
    with count_flops() as prefill:
        model(ids, kvlab.make_cache("full", model, 3, 20), logits_to_keep=1)
    assert (prefill.projections, prefill.attention) == (projections(33, 3, kv_heads), attention(3, 11, 11))
    with count_flops() as uncached:
        model(ids)
    assert (uncached.projections, uncached.attention) == (projections(33, 33, kv_heads), attention(3, 11, 11))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_decode_flops_are_one_row_over_the_keys_in_view(kind, batch):
    model = model_with(kv_heads=2)
    cache = kvlab.make_cache(kind, model, batch, 40, **KINDS[kind])
    model(torch.zeros(batch, 21, dtype=torch.long), cache)
    for length in range(22, 26):
        with count_flops() as f:
            model(torch.zeros(batch, 1, dtype=torch.long), cache)
        seen = {"sliding": 18, "heavy_hitter": 16, "random": 16, "first_last": 16}.get(
            kind, length
        )  # all slots of a head
        assert (f.projections, f.attention) == (projections(batch, batch, 2), attention(batch, 1, seen))


@pytest.mark.parametrize("cache", [None, "growing", "full", "paged"])
def test_a_whole_generation_costs_what_the_closed_form_predicts(cache):
    model = model_with(kv_heads=2)
    with count_flops() as f:
        kvlab.generate(model, [[1, 2, 3, 4, 5]], 9, cache, stop_ids=[])
    assert (f.projections, f.attention) == tuple(generation_flops(model.config, cache or "none", 5, 9))


@torch.no_grad()
def test_the_explicit_path_costs_the_same_as_the_fused_one():
    model = model_with(kv_heads=2)

    def decode(wants_weights):
        cache = kvlab.make_cache("full", model, 1, 20)
        cache.wants_weights, cache.observe = wants_weights, lambda layer, weights: None
        with count_flops() as f:
            model(torch.zeros(1, 7, dtype=torch.long), cache)
            model(torch.zeros(1, 1, dtype=torch.long), cache)
        return f

    fused, explicit = decode(False), decode(True)
    assert (fused.projections, fused.attention) == (explicit.projections, explicit.attention)
    assert any("scaled_dot_product" in op for op in fused.by_op)
    assert not any("scaled_dot_product" in op for op in explicit.by_op)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_holds_the_bytes_that_it_says(kind, dtype):
    model, batch = model_with(kv_heads=2, dtype=dtype), 2
    model(torch.zeros(1, 1, dtype=torch.long))
    with memory() as m:
        cache = kvlab.make_cache(kind, model, batch, 40, **KINDS[kind])
        model(torch.zeros(batch, 21, dtype=torch.long), cache)
        for _ in range(5):
            model(torch.zeros(batch, 1, dtype=torch.long), cache)
    # Beside what nbytes counts stay the index lists of the last step: at most five, of 8 bytes per row and token.
    index_lists = 5 * 8 * batch * 40
    assert cache.nbytes <= m.live <= cache.nbytes + index_lists
    held = live_tensors_bytes(*(value for name, value in vars(cache).items() if name != "rope_freq"))
    assert m.live == held
    assert cache.nbytes == sum(cache.nbytes_by().values())


@torch.no_grad()
def test_memory_twice_as_large_as_expected():
    """A growing cache peaks at old + new of one layer's keys; a preallocated one does not move."""
    model = model_with(kv_heads=4)
    peaks = {}
    for kind in ("growing", "full"):
        cache = kvlab.make_cache(kind, model, 1, 400)
        model(torch.zeros(1, 300, dtype=torch.long), cache)
        with memory(of=[cache]) as m:
            model(torch.zeros(1, 1, dtype=torch.long), cache)
        assert m.start == live_tensors_bytes(cache) - m.live
        peaks[kind] = m.peak
    one_layer_keys = 4 * H * D * 301
    assert peaks["growing"] >= one_layer_keys > peaks["full"]


class Careless:
    """torch.cat and nothing else: it keeps the autograd graph that hangs on its keys."""

    def __init__(self):
        self.kept = {}

    def append(self, layer, k, v, pos):
        if layer in self.kept:
            k, v, pos = (torch.cat(both, dim) for *both, dim in zip(self.kept[layer], (k, v, pos), (2, 2, 1)))
        self.kept[layer] = k, v, pos
        return kvlab.View(k, v, pos)


@pytest.mark.parametrize("kind", ["careless", *KINDS])
def test_memory_does_not_go_down_after_a_step_a_forgotten_no_grad(kind):
    """With autograd on, a careless cache keeps every step's activations; the lab's caches let go of the graph."""
    held = {}
    for name, mode in (("grad", torch.enable_grad), ("no_grad", torch.no_grad)):
        model = model_with(kv_heads=2)
        careless = kind == "careless"
        cache = adopt(Careless(), 1) if careless else kvlab.make_cache(kind, model, 1, 40, **KINDS[kind])
        with mode(), memory() as m:
            for _ in range(10):
                model(torch.zeros(1, 1, dtype=torch.long), cache)
        held[name] = m.live
    if careless:
        assert held["grad"] > 3 * held["no_grad"]
    else:
        assert held["grad"] == held["no_grad"]
