"""estimate(), fits() and their kin: the sums, the limits, the batch layouts, and what they refuse."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.memory import ConfigError, estimate, fits, kv_formats, kv_tokens, max_batch, max_seq_len, number_format
from kvlab.memory.formats import FORMATS, weight_format
from kvlab.memory.layers import heads_per_gpu

GIB = 2**30


def test_the_figures_that_the_article_begins_with():
    """LLaMA-7B in fp16: 512 MiB at 1,024 tokens, 4 GiB at batch 4 and 2,048, beside some 13 GiB of weights."""
    assert estimate("llama-7b").kv_cache_bytes == 536_870_912
    found = estimate("llama-7b", batch_size=4, seq_len=2048)
    assert found.kv_cache_bytes == 4 * GIB
    assert found.weights_bytes == 2 * 6_738_415_616
    wide = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert estimate(wide, seq_len=2048).kv_cache_bytes == 1 * 2048 * 80 * 2 * 8192 * 2


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 100),
    kv=st.integers(1, 16),
    group=st.integers(1, 8),
    dim=st.integers(1, 256),
    batch=st.integers(1, 8),
    tokens=st.integers(1, 10_000),
    size=st.sampled_from([("fp32", 4), ("fp16", 2), ("fp8", 1)]),
)
def test_the_formula(layers, kv, group, dim, batch, tokens, size):
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": kv * group,
        "num_key_value_heads": kv, "head_dim": dim,
    }  # fmt: skip
    found = estimate(config, batch, tokens, size[0])
    assert found.kv_cache_bytes == batch * tokens * layers * 2 * kv * dim * size[1]
    assert found.kv_bytes_per_token == layers * 2 * kv * dim * size[1]


def test_the_total_is_its_parts():
    found = estimate("qwen3-next", 2, 4096, weights_dtype="int8")
    parts = (found.weights_bytes, found.kv_cache_bytes, found.state_bytes, found.activation_bytes, found.context_bytes)
    assert all(p > 0 for p in parts) and found.total_bytes == sum(parts)


def test_weights_in_their_formats():
    sizes = [estimate("llama-2-7b", weights_dtype=w).weights_bytes for w in ("fp32", "fp16", "int8", "int4")]
    n = 6_738_415_616
    assert sizes[:3] == [4 * n, 2 * n, n]
    assert 4 * n / 8 < sizes[3] < 4.2 * n / 8
    assert estimate("llama-2-7b", tensor_parallel=2).weights_bytes == n
    assert 4.8 < weight_format("q4_k_m").bits < 4.9 and weight_format("q6_k").bits == pytest.approx(6.5625)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ({}, "fp16"),
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}, "torch_dtype": "float16"}, "int4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "int8"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "nf4"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8_e4m3"),
    ],
)
def test_weights_as_the_checkpoint_stores_them(stored, name):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert estimate({**config, **stored}).weights_dtype == name
    assert estimate({"text_config": {**config}, **stored}).weights_dtype == name
    assert estimate({**config, **stored}, weights_dtype="int8").weights_dtype == "int8"


def test_weights_that_are_not_known():
    bare = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    bare["model_type"] = "brand_new"  # no class defaults for its width or vocabulary
    found = estimate(bare)
    assert found.weights_bytes is None and found.total_bytes is None
    assert any("params" in w for w in found.warnings)
    with pytest.raises(ConfigError, match="weights unknown"):
        fits(bare, "t4")
    assert estimate(bare, params=1000).weights_bytes == 2000


def test_layouts_of_a_ragged_batch():
    lengths, one = [100, 1000, 3000], 524288
    padded, paged, reserved = (
        estimate("llama-2-7b", seq_len=lengths, layout=x).kv_cache_bytes // one for x in ("padded", "paged", "reserved")
    )
    assert (padded, paged, reserved) == (3 * 3000, 112 + 1008 + 3008, 3 * 4096)
    assert estimate("llama-2-7b", seq_len=lengths, layout="paged", block_size=1).kv_cache_bytes // one == sum(lengths)
    assert estimate("llama-2-7b", seq_len=lengths, layout="reserved", max_seq_len=3000).kv_cache_bytes // one == 9000
    waste = paged - sum(lengths)
    assert waste <= len(lengths) * 15  # less than one block a sequence


def test_formats_and_what_they_really_cost():
    per_32 = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
    assert {name: number_format(name).row_bytes(32) for name in per_32} == per_32
    assert number_format("nvfp4").bits == 4.5
    assert number_format("fp8").row_bytes(100) == number_format("fp8_e5m2").row_bytes(100) == 100
    assert [number_format(f"int{b}").bits for b in (8, 4, 2)] == [9, 5, 3]  # fp16 scale and zero point for 32 values
    assert number_format("int4/64").bits == 4.5 and number_format("INT4/128").bits == 4.25
    assert number_format("q4_0").row_bytes(33) == 36  # a part block costs a whole one
    assert len(FORMATS) >= 14


def test_keys_and_values_apart():
    assert kv_formats("q8_0:q4_0") == kv_formats("K q8_0 / V q4_0") == (number_format("q8_0"), number_format("q4_0"))
    mixed = estimate("llama-2-7b", kv_dtype="q8_0:q4_0").kv_cache_bytes
    both = [estimate("llama-2-7b", kv_dtype=f).kv_cache_bytes for f in ("q8_0", "q4_0")]
    assert mixed == sum(both) // 2


def test_heads_and_gpus():
    assert [heads_per_gpu(8, tp) for tp in (1, 2, 8, 16, 64)] == [8, 4, 1, 1, 1]
    for heads, tp in ((8, 3), (3, 8), (9, 2)):
        with pytest.raises(ConfigError, match="tensor_parallel"):
            heads_per_gpu(heads, tp)


@pytest.mark.parametrize("model", ["llama-2-7b", "gemma-3-12b", "qwen3-next", "deepseek-v2-lite"])
@pytest.mark.parametrize("memory", ["a100-80gb", "h200"])
def test_limits_are_the_last_that_fit(model, memory):
    batch, options = 3, {"weights_dtype": "int4", "kv_dtype": "q8_0"}
    longest = max_seq_len(model, memory, batch, **options)
    assert fits(model, memory, batch, longest, **options) and not fits(model, memory, batch, longest + 1, **options)
    most = max_batch(model, memory, 2048, **options)
    assert fits(model, memory, most, 2048, **options) and not fits(model, memory, most + 1, 2048, **options)


def test_limits_at_their_ends():
    assert max_batch("llama-2-70b", "t4") == 0 == max_seq_len("llama-2-70b", "t4")
    assert kv_tokens("mistral-7b-v0.1", GIB) is None  # every layer has a window: length costs nothing past it
    assert kv_tokens("llama-2-7b", GIB) == 2048
    assert kv_tokens("llama-2-7b", 100) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5000), st.sampled_from(["gemma-3-1b", "qwen3-next", "gpt-oss-20b", "phi-2"]))
def test_more_costs_more(batch, tokens, model):
    here = estimate(model, batch, tokens)
    assert estimate(model, batch, tokens + 1).total_bytes >= here.total_bytes
    assert estimate(model, batch + 1, tokens).total_bytes > here.total_bytes
    assert estimate(model, batch, tokens, "fp8").kv_cache_bytes * 2 == here.kv_cache_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"batch_size": "4"}, "batch_size='4'"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seq_len": 1.5}, "seq_len=1.5"),
        ({"seq_len": []}, "empty list"),
        ({"seq_len": [4, -1]}, "seq_len=-1"),
        ({"seq_len": [4, 5], "batch_size": 3}, "contradicts"),
        ({"kv_dtype": "fp12"}, "unknown number format 'fp12'"),
        ({"kv_dtype": "fp16:fp8:fp8"}, "more than two"),
        ({"kv_dtype": 16}, "kv_dtype=16"),
        ({"kv_dtype": "int4/3"}, "whole bytes"),
        ({"weights_dtype": "int5"}, "int5"),
        ({"tensor_parallel": 0}, "tensor_parallel=0"),
        ({"tensor_parallel": 3}, "32 attention heads"),
        ({"layout": "heap"}, "layout='heap'"),
        ({"layout": "paged", "block_size": 0}, "block_size=0"),
        ({"layout": "reserved", "max_seq_len": 10}, "longer than the 10 tokens"),
        ({"params": -5}, "params=-5"),
        ({"bogus": 1}, "bogus"),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ConfigError) as refusal:
        estimate("llama-2-7b", **options)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("memory", ["no-such-card", 0, -1, 1.5, None])
def test_bad_memory(memory):
    with pytest.raises(ConfigError):
        fits("llama-2-7b", memory)
