"""Checkpoints: the same logits as transformers, in and out; damaged and foreign ones refused in one sentence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvlab.checkpoint import CheckpointError, empty_model, hf_config, save_pretrained
from kvlab.config import ModelConfig
from kvlab.memory.reading import ConfigError
from kvlab.model import GPT
from kvlab.pretrained import load_pretrained

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama mha": ("Llama", {"num_key_value_heads": 4}),
    "llama gqa": ("Llama", {}),
    "llama mqa": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama wide heads": ("Llama", {"head_dim": 32}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3.1 rope": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2 window in upper layers": (
        "Qwen2",
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "mistral window": ("Mistral", {"sliding_window": 8}),
    "mistral without": ("Mistral", {"sliding_window": None}),
}
IDS = torch.randint(0, 97, (2, 48), generator=torch.Generator().manual_seed(1))


def randomize(model, seed=0):
    """Weights large enough that attention is peaked and logits are of order 1; biases and norms count too."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=rng)
            param.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    return model


@pytest.fixture(params=MODELS)
def theirs(request):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family, options = MODELS[request.param]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **options})
    return randomize(getattr(transformers, f"{family}ForCausalLM")(config).eval())


@torch.no_grad()
def test_same_logits_as_transformers(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours, tokenizer = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert tokenizer is None
    expected = theirs(IDS).logits
    assert expected.std() > 0.3  # else 1e-5 would say little
    torch.testing.assert_close(ours(IDS), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_is_saved_opens_in_transformers_and_here(theirs, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load_pretrained(tmp_path / "theirs", dtype=torch.float32, device="cpu")
    save_pretrained(ours, tmp_path / "ours")
    again, _ = load_pretrained(tmp_path / "ours", dtype=torch.float32, device="cpu")
    assert again.config == ours.config
    assert torch.equal(again(IDS), ours(IDS))
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    if theirs.config.model_type != "mistral" or theirs.config.sliding_window:  # without a window it is a Llama
        assert type(opened) is type(theirs)
    torch.testing.assert_close(opened(IDS).logits, theirs(IDS).logits, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_window_is_seen_in_the_logits(tmp_path):
    """The comparison with Mistral above would notice a window that is ignored or off by one."""
    logits = []
    for window in (8, 9, None):
        model = randomize(GPT(ModelConfig(**SMALL, sliding_window=window)))
        save_pretrained(model, tmp_path / str(window))
        logits.append(load_pretrained(tmp_path / str(window), torch.float32, "cpu")[0](IDS))
    assert (logits[0] - logits[1]).abs().max() > 1e-2 and (logits[0] - logits[2]).abs().max() > 1e-2


@torch.no_grad()
def test_shards_and_old_extras_load_alike(tmp_path):
    model = randomize(GPT(ModelConfig(**SMALL)))
    save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # older Llama files carry this table
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load_pretrained(tmp_path, torch.float32, "cpu")[0](IDS), model(IDS))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_and_layout(dtype, tmp_path):
    model = randomize(GPT(ModelConfig(**SMALL, tie_word_embeddings=True)))
    save_pretrained(model, tmp_path)
    loaded, _ = load_pretrained(tmp_path, dtype=dtype, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert [p.stride() for p in loaded.parameters()] == [p.stride() for p in GPT(model.config).parameters()]
    assert loaded.lm_head.weight is loaded.embed_tokens.weight and not loaded.training
    for (name, p), q in zip(model.named_parameters(), loaded.parameters()):
        assert torch.equal(p.to(dtype), q), name
    save_pretrained(loaded, tmp_path / "again")
    assert {t.dtype for t in load_file(tmp_path / "again" / "model.safetensors").values()} == {dtype}


def test_no_random_number_is_drawn_for_weights_that_are_overwritten():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    empty_model(ModelConfig(**SMALL), torch.float32, "cpu")
    assert torch.equal(before, torch.get_rng_state())


# ---- damaged and foreign checkpoints


@pytest.fixture
def folder(tmp_path):
    save_pretrained(randomize(GPT(ModelConfig(**SMALL, tie_word_embeddings=True))), tmp_path)
    return tmp_path


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder, error=CheckpointError):
    with pytest.raises(error) as caught:
        load_pretrained(folder, torch.float32, "cpu")
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


def test_missing_tensor(folder):
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "lacks tensor layers.1.mlp.up_proj.weight (96, 64)" in refusal(folder)


def test_missing_output_matrix_of_an_untied_model(folder):
    change_config(folder, tie_word_embeddings=False)
    assert "lacks tensor lm_head.weight (97, 64)" in refusal(folder)


def test_wrong_shape(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    assert "norm.weight has shape (63,); the configuration asks for (64,)" in refusal(folder)


def test_unexpected_tensor_such_as_qk_norm(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    assert "tensor layers.0.self_attn.q_norm.weight (16,) that its configuration has no place for" in refusal(folder)


def test_quantized_tensor(folder):
    change_tensors(folder, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert "norm.weight is stored as I8" in refusal(folder)


def test_tied_matrix_twice(folder):
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_pretrained(folder, torch.float32, "cpu")
    change_tensors(folder, lambda t: t["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from embed_tokens.weight" in refusal(folder)


def test_the_same_tensor_under_two_names(folder):
    change_tensors(folder, lambda t: t.update({"norm.weight": torch.ones(64)}))
    assert "norm.weight is in the checkpoint twice" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 300, -10])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged or not a safetensors file" in refusal(folder)


def test_config_missing_damaged_or_of_the_wrong_kind(folder):
    (folder / "config.json").write_text("[1]")
    assert "not an object" in refusal(folder, ConfigError)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refusal(folder, ConfigError)
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder, ConfigError)


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "mixtral", "minicpm3", "gpt2", "phi3", "qwen2_moe", "llama4", None]
)
def test_foreign_family_is_refused_by_name(folder, family):
    change_config(folder, model_type=family)
    assert repr(family) in (message := refusal(folder, ConfigError)) and "Mistral" in message


def test_pickles_are_refused_with_the_way_out(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pytorch_model.bin is a pickle" in message and "save_pretrained" in message


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(folder)


def test_index_that_is_damaged_or_does_not_hold(folder):
    index, file = folder / "model.safetensors.index.json", folder / "a.safetensors"
    (folder / "model.safetensors").rename(file)
    names = list(load_file(file))

    def write(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))

    write(dict.fromkeys(names, file.name))
    load_pretrained(folder, torch.float32, "cpu")
    write(dict.fromkeys([*names, "model.extra.weight"], file.name))
    assert "a.safetensors lacks tensor model.extra.weight" in refusal(folder)
    write(dict.fromkeys(names, "b.safetensors"))
    assert "names the shard b.safetensors, which is not in" in refusal(folder)
    write(dict.fromkeys(names, "../a.safetensors"))
    assert "must lie in the folder itself" in refusal(folder)
    for text in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": [1]}}', "{}"):
        index.write_text(text)
        assert "is not an index" in refusal(folder)
    index.unlink()
    save_file({"x": torch.ones(1)}, folder / "b.safetensors")
    assert "2 safetensors files but no model.safetensors.index.json" in refusal(folder)


def test_a_config_that_no_hugging_face_class_can_express():
    with pytest.raises(ValueError, match="sliding windows on 1 of 2 layers"):
        hf_config(
            ModelConfig(num_hidden_layers=2, sliding_window=8, layer_types=("full_attention", "sliding_attention"))
        )
    with pytest.raises(ValueError, match="mlp_bias=True"):
        hf_config(ModelConfig(qkv_bias=True, mlp_bias=True))


@pytest.mark.parametrize("device,message", [("cuda:999", "has (no|.*) cuda device"), ("tpu", "names no device")])
def test_a_device_that_is_not_there(folder, device, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, device=device)


def test_the_device_of_a_model_is_the_one_that_is_measured(folder, monkeypatch):
    """KVLAB_DEVICE chooses for load_pretrained as for every instrument: inputs and model lie on one device."""
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    assert load_pretrained(folder)[0].device.type == "cpu"
    monkeypatch.setenv("KVLAB_DEVICE", "cuda:999")
    with pytest.raises(ValueError, match="KVLAB_DEVICE='cuda:999'"):
        load_pretrained(folder)
