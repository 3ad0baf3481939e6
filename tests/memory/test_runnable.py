"""model_config: the Llama family read as transformers reads it, everything else refused by name."""

import json

import pytest

from kvlab.config import ModelConfig
from kvlab.memory.architecture import model_config
from kvlab.memory.reading import ConfigError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "max_window_layers": 21,
    "rope_theta": 1000000.0,
}


def test_llama_in_full():
    c = model_config({**LLAMA, "rope_scaling": {**LLAMA3, "rope_type": "llama3"}})
    assert c == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling={"rope_type": "llama3", **LLAMA3},
        tie_word_embeddings=True,
        bos_token_id=128000,
        eos_token_id=(128001, 128008),
    )


def test_both_rope_spellings_are_one():
    old = model_config({**LLAMA, "rope_scaling": {**LLAMA3, "type": "llama3"}})
    new = {k: v for k, v in LLAMA.items() if k != "rope_theta"}
    new = model_config({**new, "rope_parameters": {**LLAMA3, "rope_type": "llama3", "rope_theta": 500000.0}})
    assert old == new
    plain = model_config({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    assert plain.rope_scaling is None and plain.rope_theta == 500000.0
    linear = model_config({**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.rope_scaling == {"rope_type": "linear", "factor": 4.0}


def test_a_folder_and_a_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert model_config(tmp_path) == model_config(str(tmp_path / "config.json")) == model_config(LLAMA)


def test_missing_keys_mean_what_transformers_makes_of_them():
    bare = {k: LLAMA[k] for k in list(LLAMA)[:6]}
    c = model_config(bare)
    assert (c.num_key_value_heads, c.head_dim, c.rms_norm_eps, c.rope_theta) == (32, 64, 1e-6, 10000.0)
    assert not c.tie_word_embeddings and c.max_position_embeddings == 2048


def test_biases():
    assert model_config({**LLAMA, "attention_bias": True}).attention_bias
    assert model_config({**LLAMA, "mlp_bias": True}).mlp_bias
    q = model_config(QWEN)
    assert q.qkv_bias and not q.attention_bias


def test_qwen2_windows():
    assert model_config(QWEN).sliding_window is None
    on = model_config({**QWEN, "use_sliding_window": True})
    assert on.layer_types == ("full_attention",) * 21 + ("sliding_attention",) * 3
    assert on.window(20) is None and on.window(21) == 32768


def test_mistral_windows():
    mistral = {**LLAMA, "model_type": "mistral"}
    assert model_config({**mistral, "sliding_window": 4096}).window(0) == 4096
    assert model_config({**mistral, "sliding_window": None}).window(0) is None
    assert model_config(mistral).window(0) == 4096  # absent: the class default of transformers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gemma2"}, "gemma2"),
        ({"model_type": None}, "None"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": "qwen3"}, "qwen3"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3 has from layer 3 on (first_k_dense_replace=3)"),
        ({"model_type": "deepseek_v2"}, "mixture of experts, which this deepseek_v2 has from layer 0 on"),
        ({"model_type": "deepseek_v32"}, "deepseek_v32"),
        ({"model_type": "minicpm3"}, "minicpm3"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"qk_norm": True}, "qk-norm"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "between layer types"),
        ({"rope_parameters": {"rope_theta": 2.0}}, "contradicts"),
        ({"hidden_size": "2048"}, "hidden_size='2048'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ({"layer_types": ["sliding_attention"] * 16}, "layer_types"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ],
)
def test_refusals_name_what_is_wrong(change, words):
    with pytest.raises(ConfigError) as refusal:
        model_config({**LLAMA, **change})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    for source, words in [(tmp_path, "is not JSON"), (tmp_path / "no", "cannot read"), (5, "not int")]:
        with pytest.raises(ConfigError, match=words):
            model_config(source)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match="list"):
        model_config(tmp_path / "list.json")


def test_agrees_with_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for cls, extra in [
        (transformers.LlamaConfig, {"num_key_value_heads": 8}),
        (transformers.MistralConfig, {}),
        (transformers.Qwen2Config, {"use_sliding_window": True}),
        (transformers.LlamaConfig, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ]:
        theirs = cls(**extra)
        ours = model_config(theirs)
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        if getattr(theirs, "layer_types", None):
            assert list(ours.layer_types) == theirs.layer_types
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


DEEPSEEK = {
    **{k: LLAMA[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "model_type": "deepseek_v3",
    "num_attention_heads": 16,
    "first_k_dense_replace": 16,
    "n_routed_experts": 256,
}


def test_a_deepseek_whose_layers_are_all_dense():
    """Real files state routed experts whether a layer uses them or not; what is missing is as transformers has it."""
    c = model_config(DEEPSEEK)
    assert (c.kv_lora_rank, c.q_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim) == (
        512, 1536, 128, 64, 128)  # fmt: skip
    assert (c.head_dim, c.num_key_value_heads, c.kv_shape) == (64, 16, (1, 512, 64))
    c = model_config(
        {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "mlp_bias": True, "kv_lora_rank": 8}
    )
    assert c.q_lora_rank is None and c.mlp_bias and c.kv_lora_rank == 8 and c.max_position_embeddings == 2048
    assert model_config({**DEEPSEEK, "first_k_dense_replace": 0, "n_routed_experts": None}).kv_lora_rank == 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first_k_dense_replace": 15}, "from layer 15 on (first_k_dense_replace=15)"),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}, "'yarn' with mscale_all_dim=1.0"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}, "changes the scale of the scores"),
        ({"rope_scaling": {"type": "yarn", "factor": 40}}, "rope_type='yarn'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4 with kv_lora_rank=512"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 must be even"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"layer_types": ["sliding_attention"] * 16}, "a deepseek_v3 configuration has only full attention"),
    ],
)
def test_a_deepseek_that_cannot_run(change, words):
    with pytest.raises(ConfigError) as refusal:
        model_config({**DEEPSEEK, **change})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
