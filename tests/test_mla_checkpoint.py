"""DeepSeek checkpoints: the same logits as transformers' DeepSeek-V2 and V3, in and out. Random weights, no experts."""

import json

import pytest
import torch
from test_checkpoint import randomize
from torch import nn

from kvlab.caches import make_cache
from kvlab.checkpoint import rope_rows, save_pretrained
from kvlab.config import ModelConfig
from kvlab.memory.reading import ConfigError
from kvlab.mla import set_form
from kvlab.model import GPT
from kvlab.pretrained import load_pretrained

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
if not hasattr(transformers, "DeepseekV3ForCausalLM"):
    pytest.skip("this transformers has no DeepSeek-V3", allow_module_level=True)

SMALL = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 256, "kv_lora_rank": 24, "q_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
}  # fmt: skip
DENSE = {"first_k_dense_replace": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MODELS = {
    "v3": ("V3", {}),
    "v3 plain queries, biases": ("V3", {"q_lora_rank": None, "attention_bias": True}),
    "v3 pairs as halves": ("V3", {"rope_interleave": False, "rope_theta": 500.0}),
    "v3 linear rope": ("V3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "v2 with biases": ("V2", {"mlp_bias": True, "attention_bias": True}),
    "v2 plain queries, tied": ("V2", {"q_lora_rank": None, "tie_word_embeddings": True}),
}
IDS = torch.randint(0, 97, (2, 48), generator=torch.Generator().manual_seed(1))


def their_model(version, **options):
    config = getattr(transformers, f"Deepseek{version}Config")(**{**SMALL, **DENSE, **options})
    return randomize(getattr(transformers, f"Deepseek{version}ForCausalLM")(config).eval())


@torch.no_grad()
@pytest.mark.parametrize("version, options", MODELS.values(), ids=MODELS)
def test_same_logits_as_transformers(version, options, tmp_path):
    theirs = their_model(version, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, _ = load_pretrained(tmp_path / "theirs", dtype=torch.float32, device="cpu")
    want = theirs(IDS).logits
    assert want.std() > 0.3  # else 1e-5 would say little
    for form in ("absorbed", "expanded"):
        set_form(ours, form)
        torch.testing.assert_close(ours(IDS), want, rtol=0, atol=1e-5)

    save_pretrained(ours, tmp_path / "ours")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(opened).__name__ == f"DeepseekV{2 if options.get('mlp_bias') else 3}ForCausalLM"
    torch.testing.assert_close(opened(IDS).logits, want, rtol=0, atol=1e-5)
    again, _ = load_pretrained(tmp_path / "ours", dtype=torch.float32, device="cpu")
    set_form(again, "expanded")
    assert again.config == ours.config and torch.equal(again(IDS), ours(IDS))


class ExactRotary(nn.Module):
    """transformers' rotary table in the dtype of x."""

    def __init__(self, theirs):
        super().__init__()
        self.inv_freq = theirs.inv_freq.double()

    def forward(self, x, position_ids):
        angle = position_ids[..., None].double() * self.inv_freq
        return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()


@torch.no_grad()
def test_equal_to_transformers_in_float64(tmp_path):
    """Its norms and its rotary table compute in float32 whatever the model is, so both are replaced here."""
    theirs = their_model("V3")
    theirs.save_pretrained(tmp_path)
    ours, _ = load_pretrained(tmp_path, dtype=torch.float64, device="cpu")
    theirs = theirs.double()
    theirs.model.rotary_emb = ExactRotary(theirs.model.rotary_emb)
    for name, module in list(theirs.named_modules()):
        if type(module).__name__ == "DeepseekV3RMSNorm":
            exact = nn.RMSNorm(len(module.weight), eps=module.variance_epsilon).double()
            exact.weight.copy_(module.weight)
            parent, _, last = name.rpartition(".")
            setattr(theirs.get_submodule(parent), last, exact)
    want = theirs(IDS).logits
    assert want.dtype == torch.float64
    torch.testing.assert_close(ours(IDS), want, rtol=0, atol=1e-11)
    cache = make_cache("paged", ours, 2, 64)
    parts = [ours(IDS[:, :40], cache), *(ours(IDS[:, i : i + 1], cache) for i in range(40, 48))]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-11)


@torch.no_grad()
def test_both_keep_the_same_bytes_in_their_caches(tmp_path):
    theirs = their_model("V3")
    theirs.save_pretrained(tmp_path)
    ours, _ = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    output = theirs(IDS, use_cache=True)
    held = output["cache"] if "cache" in output else output["past_key_values"]
    if held.layers[0].keys.shape[1] > 1:
        pytest.skip("this transformers caches full keys and values of a latent model")
    cache = make_cache("full", ours, 2, 48)
    ours(IDS, cache)
    for layer, (k, v) in enumerate(zip(cache.k.values(), cache.v.values())):
        for mine, other in ((k, held.layers[layer].keys), (v, held.layers[layer].values)):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)  # the same shapes, too
    assert cache.nbytes == 3 * 2 * 48 * (24 + 8) * 4


def test_an_order_that_is_not_undone_is_seen(tmp_path):
    """Read as if it were kvlab's own order, every score is another one."""
    theirs = their_model("V3")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_interleave": False}))
    ours, _ = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert (ours(IDS) - theirs(IDS).logits).abs().max() > 1e-2


def test_rows_are_moved_where_they_turn_and_nowhere_else():
    c = ModelConfig(hidden_size=8, num_attention_heads=2, kv_lora_rank=3, qk_nope_head_dim=2, qk_rope_head_dim=4,
                    v_head_dim=5)  # fmt: skip
    assert rope_rows("layers.0.self_attn.kv_a_proj_with_mqa.weight", c).tolist() == [0, 1, 2, 3, 5, 4, 6]
    assert rope_rows("layers.0.self_attn.q_proj.weight", c).tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    for name in ("kv_b_proj.weight", "kv_a_layernorm.weight", "o_proj.bias", "q_a_proj.weight"):
        assert rope_rows(f"layers.0.self_attn.{name}", c) is None
    assert rope_rows("layers.0.self_attn.q_proj.weight", ModelConfig()) is None


@torch.no_grad()
def test_layers_that_follow_others_come_back(tmp_path):
    model = randomize(GPT(ModelConfig(**SMALL, kv_owner=(0, 0, 2))))
    save_pretrained(model, tmp_path)
    again, _ = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert again.config.kv_owner == (0, 0, 2) and torch.equal(again(IDS), model(IDS))


def test_what_is_refused(tmp_path):
    their_model("V3", first_k_dense_replace=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="mixture of experts, which this deepseek_v3 has from layer 2 on"):
        load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    with pytest.raises(
        ValueError, match="no Hugging Face class has sliding windows on 3 of 3 layers and kv_lora_rank=24"
    ):
        save_pretrained(GPT(ModelConfig(**SMALL, sliding_window=8)), tmp_path)
