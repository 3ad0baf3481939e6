"""Eleven mistakes that users reported of other calculators, each with its size, and that ours does not make it."""

import pytest

from kvlab.memory import ConfigError, architecture, estimate, find_model, fits, memory_bytes, number_format

LLAMA31_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def per_token(model, **options):
    return estimate(model, seq_len=1, **options).kv_bytes_per_token


def test_1_query_heads_in_place_of_kv_heads():
    """vllm PR 29736's review, LLM-Viewer issue 12: 2 * hidden_size * layers is 4x too much for this model."""
    hidden_size_formula = 2 * 32 * 4096 * 2
    assert per_token(LLAMA31_8B) == 131072 == hidden_size_formula // 4


def test_2_head_dim_derived_where_the_file_states_it():
    """LMCache issue 688, Model-Optimizer issue 2482: Qwen3-4B comes to 0.625x, Gemma 7B to 0.75x."""
    assert per_token("qwen3-4b") == 147456
    assert 36 * 2 * 8 * (2560 // 32) * 2 / per_token("qwen3-4b") == 0.625
    assert 28 * 2 * 16 * (3072 // 16) * 2 / per_token("gemma-7b") == 0.75


def test_3_latent_attention():
    """LMCache PR 694: a factor 2 and no rotary part; TensorRT-LLM issue 16707: unfolded heads, and no index keys."""
    assert per_token("deepseek-v3") == 61 * (512 + 64) * 2 == 70272
    assert 61 * 2 * 512 * 2 / per_token("deepseek-v3") == pytest.approx(1.78, abs=0.01)
    assert 61 * 2 * 128 * (7168 // 128) * 2 / per_token("deepseek-v3") == pytest.approx(24.9, abs=0.05)
    assert per_token("deepseek-v3.2") - per_token("deepseek-v3") == 61 * 128 * 2  # the index keeps a key of its own


def test_4_windows():
    """tt-xla issue 5727 ignores them, hf-mem issue 60 drops the layers, aiconfigurator issue 1201 lets them grow."""
    short, long = (estimate("gemma-3-27b", seq_len=s).kv_cache_bytes for s in (1024, 131072))
    layer_token = 2 * 16 * 128 * 2
    assert short == 62 * 1024 * layer_token
    assert long == (10 * 131072 + 52 * 1024) * layer_token
    assert estimate("gemma-3-27b", seq_len=131072, windows=False).kv_cache_bytes == 62 * 131072 * layer_token
    assert estimate("mistral-7b-v0.1", seq_len=32768).kv_cache_bytes == 512 * 2**20


def test_4b_heads_that_differ_between_layer_types():
    """Rapid-MLX issue 1423: sliding layers may have heads of their own (MiMo V2, Gemma 4)."""
    config = {
        "model_type": "mimo_v2_flash", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 192,
        "swa_v_head_dim": 128, "sliding_window": 128, "layer_types": ["full_attention", "sliding_attention"],
    }  # fmt: skip
    assert per_token(config) == (4 + 8) * (192 + 128) * 2


def test_5_recurrent_layers_counted_as_attention():
    """gguf-parser-go issue 28, LMCache issue 3080: 4x too much for one attention layer in four."""
    found = estimate("qwen3-next", seq_len=8192)
    every_layer = 48 * 2 * 2 * 256 * 2 * 8192
    assert found.kv_cache_bytes == every_layer // 4
    assert found.state_bytes == estimate("qwen3-next", seq_len=1).state_bytes > 0


def test_6_tensor_parallelism():
    """tenstorrent/vllm PR 50 divides a head, transformers PR 48566 does not divide; MLA is held whole by every GPU."""
    assert [per_token("llama-3-70b", tensor_parallel=tp) for tp in (1, 4, 8, 16)] == [327680, 81920, 40960, 40960]
    assert per_token("deepseek-v3", tensor_parallel=8) == per_token("deepseek-v3")
    with pytest.raises(ConfigError, match="9 attention heads"):
        estimate("smollm2-135m", tensor_parallel=2)


def test_7_the_caches_own_number_format():
    """ollama issue 10128 ignores it; unsloth issue 9525 prices a bare ratio: scales cost, 8 bits save 1.88x."""
    assert per_token("llama-2-7b", kv_dtype="fp8") * 2 == per_token("llama-2-7b")
    assert per_token("llama-2-7b") / per_token("llama-2-7b", kv_dtype="q8_0") == pytest.approx(32 / 17)
    assert per_token("llama-2-7b") / per_token("llama-2-7b", kv_dtype="q4_0") == pytest.approx(32 / 9)
    assert estimate("llama-2-7b", weights_dtype="int4").kv_cache_bytes == estimate("llama-2-7b").kv_cache_bytes


def test_8_memory_that_is_neither_weights_nor_cache():
    """vllm issue 21489, llama.cpp issue 23604: a context and activations take their share before the first token."""
    found = estimate("llama-2-7b", seq_len=1)
    assert found.total_bytes - found.weights_bytes - found.kv_cache_bytes >= found.context_bytes >= 107 * 2**20
    just_weights = found.weights_bytes + found.kv_cache_bytes
    assert not fits("llama-2-7b", just_weights, seq_len=1)


def test_9_gb_and_gib():
    """hf-mem issue 33, unsloth issue 6895: a T4's "16 GB" is 15360 MiB, and our GiB are 2**30 bytes."""
    assert memory_bytes("t4") == 15360 * 2**20 < 16 * 2**30
    assert estimate("llama-2-7b", seq_len=1024).kv_cache_bytes == 536_870_912 == 0.5 * 2**30


def test_10_groups_is_a_word_with_two_meanings():
    """rasbt/LLMs-from-scratch issue 922: ChatGLM's multi_query_group_num counts KV heads, not a group's size."""
    assert per_token("chatglm2-6b") == 28 * 2 * 2 * 128 * 2
    nas = {
        "model_type": "nemotron-nas", "num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 8192,
        "block_configs": [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}}],
    }  # fmt: skip
    assert per_token(nas) == 2 * (64 // 8) * 128 * 2  # here the number is the size of a group


def test_11_a_cache_where_nothing_is_generated():
    """LLM-Tools PR 6 counted one for training. An encoder has none either, and training is not estimated here."""
    assert estimate("bert-base", seq_len=512).kv_cache_bytes == 0
    with pytest.raises(ConfigError, match="no option 'training'"):
        estimate("llama-2-7b", training=True)


def test_names_that_look_alike():
    """The same 40 layers of 64 query heads: 64 KV heads in the first Command-R."""
    assert per_token("command-r-v01") == 8 * 2 * 40 * 8 * 128 * 2
    assert per_token("llama-2-70b") < per_token("llama-2-13b")  # GQA: the larger model has the smaller cache


def test_keys_and_values_need_not_be_equally_wide():
    """DeepSeek without MLA: keys of 192, values of 128 (ik_llama.cpp issue 230 prints 81 and 54 MiB)."""
    unfolded = architecture(find_model("deepseek-v2-lite")["config"], mla=False).layers[0]
    fp16 = number_format("fp16")
    assert (unfolded.head_dim, unfolded.v_head_dim) == (192, 128)
    assert unfolded.token_bytes(fp16, fp16) == 16 * (192 + 128) * 2
