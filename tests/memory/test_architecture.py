"""Configurations as they are published, with all their oddities; and those that must be refused."""

import json

import pytest

from kvlab.config import ModelConfig
from kvlab.memory import ConfigError, advise, architecture, estimate, models
from kvlab.memory.shapes import SHAPES
from kvlab.memory.spellings import READ

SHAPE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
GQA = {**SHAPE, "num_key_value_heads": 2}


def kinds(config, **options):
    return architecture(config, **options).kinds


def heads(config):
    return [layer.kv_heads for layer in architecture(config).layers]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4}, [4] * 4),
        ({"model_type": "mpt", "d_model": 64, "n_layers": 4, "n_heads": 4}, [4] * 4),
        ({"model_type": "mpt", "d_model": 64, "n_layers": 4, "n_heads": 4, "attn_config": {"kv_n_heads": 2}}, [2] * 4),
        ({"model_type": "dbrx", "d_model": 64, "n_layers": 4, "n_heads": 4, "attn_config": {"kv_n_heads": 2}}, [2] * 4),
        ({"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 4, "n_head": 4}, [1] * 4),
        ({"model_type": "gpt_bigcode", "n_embd": 64, "n_layer": 4, "n_head": 4, "multi_query": False}, [4] * 4),
        ({"model_type": "falcon", **SHAPE, "multi_query": True, "num_kv_heads": 4}, [1] * 4),
        ({"model_type": "falcon", **SHAPE, "new_decoder_architecture": True, "num_kv_heads": 2}, [2] * 4),
        ({"model_type": "falcon", **SHAPE, "multi_query": False}, [4] * 4),
        ({"model_type": "RefinedWeb", "hidden_size": 64, "n_layer": 4, "n_head": 4, "n_head_kv": 2}, [2] * 4),
        ({"model_type": "chatglm", "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "kv_channels": 16,
          "multi_query_attention": True, "multi_query_group_num": 2}, [2] * 4),
        ({"model_type": "chatglm", "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "kv_channels": 16,
          "multi_query_attention": False, "multi_query_group_num": 2}, [4] * 4),
        ({"model_type": "openelm", "model_dim": 64, "num_transformer_layers": 2, "num_query_heads": [2, 4],
          "head_dim": 16, "num_kv_heads": [1, 2]}, [1, 2]),
        ({"model_type": "baichuan", **SHAPE}, [4] * 4),
        ({"model_type": "bloom", "n_embed": 64, "n_layer": 4, "num_attention_heads": 4}, [4] * 4),
        ({"model_type": "plamo", **SHAPE, "n_shared_head": 4}, [1] * 4),
        ({"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 128}, [2] * 4),
    ],
)  # fmt: skip
def test_kv_heads_in_every_spelling(config, expected):
    assert heads(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen2", **SHAPE, "num_key_value_heads": 2, "sliding_window": 8}, {"full": 4}),
        ({"model_type": "qwen2", **SHAPE, "num_key_value_heads": 2, "sliding_window": 8, "use_sliding_window": True,
          "max_window_layers": 3}, {"full": 3, "sliding": 1}),
        ({"model_type": "gemma2", **SHAPE, "num_key_value_heads": 2, "sliding_window": 8}, {"sliding": 2, "full": 2}),
        ({"model_type": "cohere2", **SHAPE, "sliding_window": 8, "sliding_window_pattern": 2},
         {"sliding": 2, "full": 2}),
        ({"model_type": "exaone4", **GQA, "sliding_window": 8, "sliding_window_pattern": "LLLG"},
         {"sliding": 3, "full": 1}),
        ({"model_type": "llama4_text", **SHAPE, "attention_chunk_size": 8, "num_key_value_heads": 2},
         {"chunked": 3, "full": 1}),
        ({"model_type": "gpt_neo", "hidden_size": 64, "num_layers": 4, "num_heads": 4, "window_size": 8,
          "attention_types": [[["global", "local"], 2]]}, {"full": 2, "sliding": 2}),
        ({"model_type": "recurrent_gemma", **GQA, "_block_types": ["recurrent", "recurrent", "attention"],
          "attention_window_size": 8, "lru_width": 64}, {"state": 3, "sliding": 1}),
        ({"model_type": "jamba", **GQA, "attn_layer_period": 4, "attn_layer_offset": 1}, {"state": 3, "full": 1}),
        ({"model_type": "kimi_linear", **GQA, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "linear_attn_config":
          {"full_attn_layers": [4], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}},
         {"state": 3, "latent": 1}),
        ({"model_type": "minimax", **GQA, "attn_type_list": [0, 0, 0, 1]}, {"state": 3, "full": 1}),
        ({"model_type": "lfm2", **GQA, "full_attn_idxs": [1], "conv_L_cache": 3}, {"state": 3, "full": 1}),
        ({"model_type": "falcon_h1", **GQA, "mamba_n_heads": 4, "mamba_d_head": 16}, {"both": 4}),
        ({"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 4}, {"state": 4}),
        ({"model_type": "bert", **SHAPE}, {"none": 4}),
        ({"model_type": "bert", **SHAPE, "is_decoder": True}, {"full": 4}),
        ({"model_type": "t5", "d_model": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8,
          "is_encoder_decoder": True}, {"full": 2, "cross": 2}),
        ({"model_type": "mllama", "text_config": {"model_type": "mllama_text_model", **SHAPE, "num_key_value_heads": 2,
          "cross_attention_layers": [1]}}, {"full": 3, "cross": 1}),
        ({"model_type": "llama4_text", **GQA, "attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]},
         {"chunked": 2, "full": 2}),
        ({"model_type": "llama4_text", **GQA, "attention_chunk_size": 8, "no_rope_layers": [],
          "no_rope_layer_interval": 2}, {"chunked": 2, "full": 2}),
        ({"model_type": "llama4_text", **GQA, "attention_chunk_size": None}, {"full": 4}),
        ({"model_type": "smollm3", **GQA, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": True,
          "sliding_window": 8}, {"full": 3, "sliding": 1}),
        ({"model_type": "smollm3", **GQA, "no_rope_layers": [1, 1, 1, 0]}, {"full": 4}),
        ({"model_type": "zamba", **GQA, "attn_layer_period": 6, "attn_layer_offset": 4}, {"state": 3, "both": 1}),
        ({"model_type": "clip_vision_model", **SHAPE}, {"none": 4}),
        ({"model_type": "clip", "text_config": {"model_type": "clip_text_model", **SHAPE}}, {"none": 4}),
        ({"model_type": "llama", **GQA, "text_config": {}}, {"full": 4}),
        ({"model_type": "hunyuan", **SHAPE, "use_cla": True, "cla_share_factor": 2}, {"full": 2, "shared": 2}),
    ],
)  # fmt: skip
def test_kinds_of_layers(config, expected):
    assert kinds(config) == expected


def test_a_multimodal_file_that_leans_on_class_defaults():
    """Gemma 3 4B's own file names no heads; LLaVA's names hardly anything. Each says what was assumed."""
    gemma = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    }  # fmt: skip
    found = estimate(gemma, seq_len=8192)
    assert found.kv_cache_bytes == estimate("gemma-3-4b", seq_len=8192).kv_cache_bytes
    assert "num_key_value_heads=4" in found.warnings[0]
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert estimate(llava).kv_bytes_per_token == 524288


def test_cross_attention_is_fixed_by_the_input():
    one, two = (estimate("t5-base", seq_len=n, encoder_len=100).kv_cache_bytes for n in (10, 20))
    layer_token = 12 * 2 * 12 * 64 * 2
    assert one == (10 + 100) * layer_token and two - one == 10 * layer_token
    silent = estimate("t5-base", seq_len=10)
    assert silent.kv_cache_bytes == 10 * layer_token and "encoder_len" in silent.warnings[0]
    whisper = estimate("whisper-large-v3", seq_len=448)
    assert whisper.kv_cache_bytes == (448 + 1500) * 32 * 2 * 20 * 64 * 2 and not whisper.warnings


def test_an_unknown_family_is_computed_with_a_warning_or_refused():
    found = architecture({"model_type": "brand_new", **SHAPE, "num_key_value_heads": 2})
    assert found.kinds == {"full": 4} and "brand_new" in found.warnings[0]
    with pytest.raises(ConfigError, match="brand-new-attention"):
        architecture({"model_type": "brand_new", **SHAPE, "layer_types": ["brand-new-attention"] * 4})
    with pytest.raises(ConfigError, match="cannot size"):
        architecture({"model_type": "brand_new", **SHAPE, "layer_types": ["linear_attention"] * 4})


def test_a_state_whose_head_width_is_auto_or_missing():
    """Granite 4 and Bamba: heads share the inner width, expand * hidden_size, out among themselves."""
    granite = {
        "model_type": "granitemoehybrid", **GQA, "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    expected = 3 * 4 * (128 * 16 + 3 * (128 + 2 * 16))
    for said in ({}, {"mamba_d_head": "auto"}, {"mamba_d_head": 16}):
        assert estimate({**granite, **said}).state_bytes == expected


def test_the_files_of_the_mamba_ssm_package():
    """d_model, n_layer and an ssm_cfg: mamba-2.8b's own config.json; llama.cpp PR 5328 prints 23.75 MiB."""
    own = {"d_model": 2560, "n_layer": 64, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True}
    assert estimate(own).state_bytes == 23.75 * 2**20 and estimate(own).kv_cache_bytes == 0
    two = {**own, "ssm_cfg": {"layer": "Mamba2"}}
    assert estimate(two).state_bytes == 64 * 4 * (5120 * 128 + 3 * (5120 + 2 * 128))
    with pytest.raises(ConfigError, match="attn_layer_idx"):
        estimate({**two, "attn_layer_idx": [9, 18]})


def test_keys_that_no_cache_depends_on_may_disagree():
    """Qwen-7B-Chat states 32768 positions and a seq_length of 8192, and means both."""
    config = {"model_type": "qwen", **SHAPE, "max_position_embeddings": 32768, "seq_length": 8192}
    assert architecture(config).max_positions == 32768
    assert advise(config, "t4", params=10**6).cause == "fits"


def test_nothing_but_a_sentence_comes_of_nonsense():
    """Every key that is read, with every kind of value: bytes or a ConfigError, never another exception."""
    rich = [e["config"] for e in models() if e["config"]["model_type"] in ("llama", "gemma3_text", "jamba", "falcon")]
    shapes = {c["model_type"]: c for c in rich}.values()
    tried = 0
    for config in shapes:
        for key in sorted(READ | set(SHAPES) | {"quantization_config", "attn_config", "layer_types", "ssm_cfg"}):
            for value in ("x", "8", 0, -1, 1.5, True, [], {}, [1], ["a"], [None], [{}], [[1]], {"a": 1}):
                tried += 1
                try:
                    estimate({**config, key: value})
                except ConfigError as error:
                    assert "\n" not in str(error) and len(str(error)) < 800
    assert tried > 5000


def test_our_own_config_and_files(tmp_path):
    ours = ModelConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    assert estimate(ours).kv_bytes_per_token == ours.kv_bytes_per_token()
    windowed = ours.with_(sliding_window=8, layer_types=("full_attention", "sliding_attention") * 2)
    assert estimate(windowed, seq_len=100).kv_cache_bytes == (2 * 100 + 2 * 8) * 2 * 2 * 16 * 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    assert estimate(str(tmp_path)).kv_bytes_per_token == estimate(tmp_path / "config.json").kv_bytes_per_token == 1024


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": -4}, "num_hidden_layers=-4"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"hidden_size": 4.5}, "hidden_size=4.5"),
        ({"n_layer": 5}, "contradicts"),
        ({"n_embd": 65}, "contradicts"),
        ({"num_attention_heads": 3}, "head_dim must be given"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2'"),
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        ({"layer_types": "full"}, "must be a list"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": -1}, "sliding_window=-1"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers=9"),
        ({"hybrid_override_pattern": "M?M*"}, "'?'"),
        ({"model_type": "reformer"}, "hashed"),
        ({"model_type": 5}, "model_type=5"),
        ({"vocab_size": "32000"}, "vocab_size='32000'"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"intermediate_size": "x"}, "intermediate_size='x'"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings='long'"),
        ({"cross_attention_layers": "x"}, "cross_attention_layers='x'"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"block_configs": [{}]}, "block_configs=[{}]"),
        ({"block_configs": [{"attention": {"n_heads_in_group": 2}}]}, "nothing for layer 1"),
        ({"attention_types": [1]}, "attention_types=[1]"),
        ({"kv_heads_per_layer": [1, 2]}, "nothing for layer 2"),
        ({"model_type": "brand_new", "mamba_d_state": 16}, "mamba_d_state=16"),
        ({"model_type": "mistral"}, "the file has no num_key_value_heads, and the 8"),
    ],
)
def test_bad_configurations(change, words):
    with pytest.raises(ConfigError) as refusal:
        estimate({"model_type": "llama", **SHAPE, **change})
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("source", [{}, {"model_type": "llama"}, {"text_config": {}}, 7, None, []])
def test_what_is_no_configuration(source):
    with pytest.raises(ConfigError):
        estimate(source)
