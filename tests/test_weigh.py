"""A model weighed on the meta device: the same bytes as the real thing, and nothing allocated."""

import pytest
import torch
from torch.nn import functional as F

from kvlab import GPT, ModelConfig, make_cache
from kvlab.exercise_list import llama_3b, llama_7b
from kvlab.measure import memory
from kvlab.memory import estimate
from kvlab.weigh import FusedAttention, on_meta, weigh

SMALL = ModelConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
KINDS = ("growing", "full", "paged")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_cache_on_meta_holds_what_it_holds_with_values(kind, batch):
    held = {}
    for device in ("meta", "cpu"):
        model = on_meta(SMALL, torch.float32) if device == "meta" else GPT(SMALL)
        cache = make_cache(kind, model, batch, 40)
        ids = torch.zeros(batch, 21, dtype=torch.int64, device=device)
        with torch.no_grad():
            model(ids[:, :20], cache)
            logits = model(ids[:, 20:], cache)
        assert logits.shape == (batch, 1, 64) and logits.device.type == device
        held[device] = cache.nbytes_by(), cache.lengths, cache.bytes_copied, cache.bytes_read
    assert held["meta"] == held["cpu"]


def test_rows_must_agree_on_meta_too():
    model = on_meta(SMALL)
    cache = make_cache("full", model, 2, 8)
    with pytest.raises(ValueError, match="batch_size=3"):
        model(torch.zeros(3, 2, dtype=torch.int64, device="meta"), cache, torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_is_that_of_a_run_with_values(kind):
    """Dense attention on meta against the plain formula on a CPU; the kernels of both are taken apart alike."""
    w = weigh(SMALL, 2, 33, kind, dtype=torch.float32, attention="dense")
    model, cache = GPT(SMALL), make_cache(kind, GPT(SMALL), 2, 33)
    ids = torch.zeros(2, 33, dtype=torch.int64)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), memory() as m:
        model(ids[:, :32], cache, logits_to_keep=1)
        assert w.cache == pytest.approx(m.live, rel=0.02)
    # indices live on the CPU for both, and one on the meta device counts only what lies there
    assert w.weights + m.peak == pytest.approx(w.peak, rel=0.05)


@pytest.mark.parametrize("config, seq", [(llama_7b(), 64), (llama_3b(), 64)])
def test_weights_and_cache_are_the_formula(config, seq):
    config = config.with_(num_hidden_layers=4, layer_types=None)
    w = weigh(config, 2, seq)
    e = estimate(config, 2, seq)
    norms = 2 * (2 * config.num_hidden_layers + 1) * config.hidden_size
    assert w.weights - e.weights_bytes in (0, norms)  # the calculator may leave out the norms' gains
    assert w.cache - e.kv_cache_bytes in range(2048)  # and the positions of the last step
    assert w.peak >= w.weights + w.cache + w.decode


def test_fused_attention_takes_the_scores_away():
    dense, fused = (weigh(SMALL, 1, 513, attention=a).prefill for a in ("dense", "fused"))
    assert dense - fused >= 4 * SMALL.num_attention_heads * 512**2  # fp32


def test_smaller_chunks_need_less_for_a_moment():
    whole, parts = (weigh(SMALL, 1, 257, prefill_chunk=n) for n in (None, 32))
    assert parts.prefill < whole.prefill / 4 and parts.cache == whole.cache


def test_growing_needs_a_second_copy_of_one_layer():
    full, growing = (weigh(SMALL, 1, 1025, k).decode for k in ("full", "growing"))
    one_layer = 1024 * SMALL.kv_bytes_per_token(2) // SMALL.num_hidden_layers
    assert 0.8 * one_layer <= growing - full <= 1.2 * one_layer


@pytest.mark.parametrize(
    "kw, words", [({"attention": "flash"}, "'fused' or 'dense'"), ({"kind": "sliding"}, "without values"),
                  ({"seq_len": 1}, "at least 2")],
)  # fmt: skip
def test_bad_input(kw, words):
    with pytest.raises(ValueError, match=words):
        weigh(SMALL, **kw)


def test_fused_attention_refuses_values():
    q = torch.ones(1, 1, 1, 2)
    with pytest.raises(ValueError, match="meta tensors"), FusedAttention():
        F.scaled_dot_product_attention(q, q, q)
