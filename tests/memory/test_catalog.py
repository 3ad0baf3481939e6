"""The catalog: every entry recomputed, by a formula that shares nothing with the calculator, and its names."""

import pytest

from kvlab.memory import ConfigError, architecture, estimate, find_gpu, find_model, gpus, models
from kvlab.memory.params import parameter_count

MODELS, GPUS = models(), gpus()
SURE = {"file", "class", "log", "unchecked"}


def by_name(entries):
    return pytest.mark.parametrize("entry", entries, ids=lambda e: e["name"].split("/")[-1])


def plain(entry):
    """(layers, KV heads, head_dim) where the model is nothing but full or sliding attention of one shape."""
    c = entry["config"]
    c = c.get("text_config", c)
    other = ("kv_lora_rank", "kv_heads_per_layer", "full_attention_interval", "num_kv_shared_layers", "state_size")
    other += ("hybrid_override_pattern", "attn_layer_period", "is_encoder_decoder", "block_types")
    if any(c.get(k) is not None for k in other) or c["model_type"] == "bert":
        return None

    def first(*names):
        return next((c[k] for k in names if c.get(k) is not None), None)

    heads = first("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv = first("num_key_value_heads", "multi_query_group_num")
    if c["model_type"] == "falcon":
        kv = c.get("num_kv_heads") if c.get("new_decoder_architecture") else 1
    kv = kv or c.get("attn_config", {}).get("kv_n_heads")
    if c.get("multi_query") and c["model_type"] == "gpt_bigcode":
        kv = 1
    dim = first("head_dim", "kv_channels") or first("hidden_size", "n_embd", "n_embed", "d_model") // heads
    return first("num_hidden_layers", "n_layer", "n_layers", "num_layers"), kv or heads, dim


def test_the_catalog_is_large_enough():
    assert len(MODELS) >= 60 and len(GPUS) >= 25
    assert len({e["name"] for e in MODELS}) == len(MODELS) and len({e["name"] for e in GPUS}) == len(GPUS)


@by_name(MODELS)
def test_model(entry):
    assert entry["confidence"] in SURE and len(entry["source"]) > 10
    found = estimate(entry["config"], seq_len=8192, encoder_len=0)
    assert found.kv_bytes_per_token == entry["kv_bytes_per_token"]
    assert found.kv_cache_bytes == entry["bytes_at_8192"] and found.state_bytes == entry["state_bytes"]
    if shape := plain(entry):
        layers, kv, dim = shape
        assert entry["kv_bytes_per_token"] == 2 * layers * kv * dim * 2
    count = parameter_count(architecture(entry["config"]))
    if count and entry["params"] and "vision" not in entry["name"]:  # that one's image encoder is not counted
        assert count == pytest.approx(entry["params"], rel=0.02)
    assert not architecture(entry["config"]).warnings


def test_most_models_are_plain_and_have_parameters():
    assert sum(1 for e in MODELS if plain(e)) >= 80
    assert sum(1 for e in MODELS if e["params"]) >= 110


@by_name([e for e in MODELS if e["state_bytes"]])
def test_states(entry):
    """Recurrent states by hand: k - 1 columns of the convolution's inputs, and the state itself, in fp32."""
    c, layers = entry["config"], architecture(entry["config"]).kinds["state"]
    if c["model_type"] == "nemotron_h":
        inner, groups = c["mamba_num_heads"] * c["mamba_head_dim"], c["n_groups"] * c["ssm_state_size"]
        values = inner * c["ssm_state_size"] + (c["conv_kernel"] - 1) * (inner + 2 * groups)
    elif "linear_num_value_heads" in c:
        v = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        k = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = v * c["linear_key_head_dim"] + (c["linear_conv_kernel_dim"] - 1) * (v + 2 * k)
    elif c["model_type"] == "recurrent_gemma":
        values = c["lru_width"] * (1 + c["conv1d_width"] - 1)
    else:
        inner = c["hidden_size"] * c.get("expand", c.get("mamba_expand"))
        columns = c.get("conv_kernel", c.get("mamba_d_conv")) - 1
        values = inner * (c.get("state_size", c.get("mamba_d_state")) + columns)
    assert entry["state_bytes"] == layers * values * 4


@by_name(GPUS)
def test_gpu(entry):
    assert entry["confidence"] in ("driver", "unchecked") and entry["source"]
    assert 0.89 < entry["memory_mib"] / (entry["label_gb"] * 1024) < 1.03  # what the driver reports, not the label
    assert entry["bandwidth_gb_s"] > 0 and isinstance(entry["bf16"], bool)
    for alias in entry["aliases"]:
        assert find_gpu(alias) is entry


def test_cards_whose_memory_is_known():
    known = {"t4": 15360, "l4": 23034, "a10g": 23028, "a100-80gb": 81920, "h100": 81559, "h200": 143771, "b200": 183359}
    assert {name: find_gpu(name)["memory_mib"] for name in known} == known


@by_name(MODELS)
def test_every_name_and_alias_finds_its_entry(entry):
    for name in (entry["name"], *entry["aliases"]):
        assert find_model(name) is entry
        assert find_model(name.upper()) is entry


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("LLaMA_2 7B", "meta-llama/Llama-2-7b-hf"),
        ("llama3_70b_hf", "meta-llama/Meta-Llama-3-70B"),
        ("google/gemma-3-27b-it-qat", "google/gemma-3-27b-it"),
        ("Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B"),
        ("TheBloke/Mistral-7B-Instruct-v0.1-AWQ", "mistralai/Mistral-7B-v0.1"),
        ("TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ", "mistralai/Mixtral-8x7B-v0.1"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistralai/Mistral-Small-24B-Base-2501"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", "Qwen/Qwen2.5-32B"),
        ("bigscience/bloomz-560m", "bigscience/bloom-560m"),
    ],
)
def test_variants_share_a_shape(name, entry):
    assert find_model(name)["name"] == entry


def test_names_that_look_alike_are_kept_apart():
    """The first Command-R has 64 KV heads, its refresh 8; GLM-Z1's Rumination 8 where GLM-Z1 has 2."""
    assert (
        find_model("command-r-v01")["kv_bytes_per_token"] == 8 * find_model("command-r-08-2024")["kv_bytes_per_token"]
    )
    assert (
        find_model("glm-z1-rumination-32b")["kv_bytes_per_token"] == 4 * find_model("glm-z1-32b")["kv_bytes_per_token"]
    )


def test_a_card_by_its_full_name():
    assert find_gpu("NVIDIA GeForce RTX 4090") is find_gpu("rtx4090") is find_gpu("4090")
    assert find_gpu("Tesla T4")["memory_mib"] == 15360


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: find_model("lama-2-7b"), "did you mean meta-llama/Llama-2-7b-hf"),
        (lambda: find_model("command-r-09-2025"), "did you mean CohereForAI/c4ai-command-r"),  # no guess from its kin
        (lambda: find_model(" "), "empty"),
        (lambda: find_gpu("h10"), "did you mean"),
        (lambda: find_gpu("zzz"), "no card named 'zzz'"),
    ],
)
def test_names_that_are_not_there(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_a_path_is_not_a_name():
    assert find_model("./config.json") is None and find_model("some/dir/config.json") is None
