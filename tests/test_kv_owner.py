"""Layers that follow another (ModelConfig.kv_owner): exact, with half the bytes, in every count, file and refusal."""

import json

import pytest
import torch
from oracles import (
    assert_equals_oracle,
    assert_logits,
    call,
    causal_logits,
    dense_logits,
    feed,
    ids_for,
    in_chunks,
    rule_of,
    toy,
)

import kvlab.model
from kvlab import GPT, ModelConfig, cost, make_cache
from kvlab.caches import KINDS
from kvlab.checkpoint import hf_config, save_pretrained
from kvlab.measure import count_flops
from kvlab.memory import ConfigError, estimate
from kvlab.memory.architecture import architecture, model_config
from kvlab.pretrained import load_pretrained

MAPS = [(0, 0, 2, 2), (0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0)]
OPTIONS = {
    "sliding": {"window": 5, "sinks": 2},
    "quantized": {"group_size": 4, "residual_length": 3, "k_bits": 4, "v_bits": 4},
    "paged": {"block_size": 4},
    "shared": {"owners": (0, 1, 0, 1)},
}
EVICTING = (
    "heavy_hitter",
    "random",
    "first_last",
)  # their reference goes token by token: tests/caches/test_evicting.py


def follower(owners, **changes) -> GPT:
    return toy(num_hidden_layers=len(owners), kv_owner=owners, **changes)


@pytest.mark.parametrize("owners", MAPS, ids=str)
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_without_a_cache_equal_to_both_references(owners, n_kv):
    model, text = follower(owners, num_key_value_heads=n_kv, qkv_bias=n_kv == 2), ids_for(0, [17])[0]
    with torch.no_grad():
        got = model(torch.tensor([text]))[0]
    want = causal_logits(model, text)
    assert_logits(got, want)
    assert_logits(got, dense_logits(model, text))
    assert want.std() > 0.1


def test_a_follower_has_no_projections_to_keys_and_values():
    names = [name for name, _ in follower((0, 0, 2, 2), qkv_bias=True).named_parameters()]
    for layer in range(4):
        for part in "qkvo":
            there = any(name.startswith(f"layers.{layer}.self_attn.{part}_proj.") for name in names)
            assert there == (part in "qo" or layer in (0, 2))


def hold(kind: str, owners, rule=None, **changes) -> None:
    """The property of every cache, on one ragged text in several chunkings."""
    model, options, lengths = follower(owners, **changes), OPTIONS.get(kind, {}), [17, 11]
    for chunk in (1, 7, 17):
        cache = make_cache(kind, model, 2, 20, **options)
        assert_equals_oracle(
            model, cache, ids_for(1, lengths), in_chunks(lengths, chunk), rule or rule_of(kind, options)
        )
        stored = {options.get("owners", range(4))[owner] for owner in owners}
        assert set(cache.codes if kind == "quantized" else cache.pool.k if kind == "paged" else cache.k) == stored


@pytest.mark.parametrize("owners", [(0, 0, 2, 2), (0, 1, 0, 1)], ids=str)
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in EVICTING])
def test_every_cache_however_it_is_fed(kind, owners):
    hold(kind, owners)


@pytest.mark.parametrize("window", [1, 4])
def test_sliding_layers_follow_sliding_layers(window):
    types = ("sliding_attention", "full_attention") * 2
    hold("full", (0, 1, 0, 1), sliding_window=window, layer_types=types)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in EVICTING])
def test_a_follower_that_fails_leaves_the_cache_as_it_was(kind):
    model, options = follower((0, 1, 0, 1)), OPTIONS.get(kind, {})
    rows = ids_for(2, [9, 6])
    cache = make_cache(kind, model, 2, 30, **options)
    feed(model, cache, rows, [[9, 6]])
    before = cache.lengths, cache.nbytes_in_use, cache.nbytes_by()["keys"]
    block = model.layers[3].mlp

    def out_of_memory(x):
        raise RuntimeError("out of memory")

    block.forward = out_of_memory
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            call(model, cache, [[1], [2]], [9, 6])
    finally:
        del block.forward
    assert (cache.lengths, cache.nbytes_in_use, cache.nbytes_by()["keys"]) == before
    got = call(model, cache, [[3, 4], [5]], [9, 6])
    for b, new in enumerate(([3, 4], [5])):
        want = dense_logits(model, rows[b] + new, rule_of(kind, options))[len(rows[b]) :]
        assert_logits(got[b], want, what=f"row {b}")


@pytest.mark.parametrize("kind", ["growing", "full", "sliding", "quantized", "paged", "offloaded"])
def test_half_the_layers_hold_half_the_bytes(kind):
    texts, held = ids_for(3, [12]), {}
    for owners in ((0, 1, 2, 3), (0, 0, 2, 2)):
        model = follower(owners)
        cache = make_cache(kind, model, 1, 16, **OPTIONS.get(kind, {}))
        feed(model, cache, texts, [[12]])
        by = cache.nbytes_by()
        held[owners] = {name: n for name, n in by.items() if name not in ("positions", "tables")}
        found = estimate(
            model.config, 1, 12, cache=kind, kv_dtype="fp32", max_length=16, **OPTIONS.get(kind, {})
        ).held_bytes
        assert found is not None and (kind != "full" or cache.nbytes == 2 * found)  # the toy is in float64
    assert {name: 2 * n for name, n in held[0, 0, 2, 2].items()} == held[0, 1, 2, 3]


# ---- planted bugs


class SeesThePrevious(dict):
    """A follower takes the view that was put there last, whoever its owner is."""

    def __getitem__(self, owner):
        return list(self.values())[-1]


class Stale(dict):
    """A view that is there already is not replaced."""

    def __setitem__(self, owner, view):
        self.setdefault(owner, view)


STALE = Stale()


@pytest.mark.parametrize("bug", ["the previous layer instead of the owner", "the view of an earlier pass"])
def test_a_planted_bug_fails_the_check(bug, monkeypatch):
    class Wrong(kvlab.model.Pass):
        def __init__(self, *args):
            super().__init__(*args)
            self.views = SeesThePrevious() if "previous" in bug else STALE

    STALE.clear()
    monkeypatch.setattr(kvlab.model, "Pass", Wrong)
    with pytest.raises((AssertionError, RuntimeError)):
        hold("full", (0, 1, 0, 1))


def test_the_owner_is_told_of_its_followers_weights():
    """observe() is called once for each layer, with the owner's index: all queries that use a key are counted."""
    model, told = follower((0, 1, 0, 1)), []
    cache = make_cache("full", model, 1, 8)
    cache.wants_weights, cache.observe = True, lambda layer, weights: told.append((layer, tuple(weights.shape)))
    assert_logits(call(model, cache, [[1, 2, 3]], [0])[0], dense_logits(model, [1, 2, 3]))
    assert told == [(layer, (1, 2, 3, 3)) for layer in (0, 1, 0, 1)]


# ---- counts


@pytest.mark.parametrize("owners", [(0, 1, 2, 3), (0, 0, 2, 2), (0, 0, 0, 0)], ids=str)
def test_flops_as_they_are_counted(owners):
    model = follower(owners)
    for T in (1, 9):
        with torch.no_grad(), count_flops(model) as counted:
            model(torch.zeros(1, T, dtype=torch.long), logits_to_keep=1)
        assert (counted.projections, counted.attention) == cost.forward_flops(model.config, T, T)
    steps = [cost.forward_flops(model.config, 5, 5), *(cost.forward_flops(model.config, 1, n) for n in (6, 7))]
    assert cost.generation_flops(model.config, "full", 5, 3) == tuple(map(sum, zip(*steps)))


def test_flops_of_following_latents():
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    config = ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=4, kv_owner=(0, 0, 2, 2), **latent)
    model = GPT(config)
    with torch.no_grad(), count_flops(model) as counted:
        model(torch.zeros(1, 7, dtype=torch.long), logits_to_keep=1)
    assert (counted.projections, counted.attention) == cost.forward_flops(config, 7, 7)


@pytest.mark.parametrize("owners", MAPS, ids=str)
def test_the_calculator_and_the_config_agree(owners):
    model = follower(owners)
    config = model.config
    found = estimate(config, 1, 10, kv_dtype="fp16")
    assert found.kv_bytes_per_token == config.kv_bytes_per_token(2)
    assert found.kv_cache_bytes == 10 * config.kv_bytes_per_token(2)
    assert config.kv_bytes_per_token(2) == len(set(owners)) * 2 * 2 * 8 * 2  # layers, K and V, heads, head_dim, bytes
    assert architecture(hf_config(config)).kinds == {"full": len(set(owners)), "shared": 4 - len(set(owners))}
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert found.params == matrices  # norms are left out there


# ---- files


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"sliding_window": 8}], ids=str)
def test_saved_and_loaded(changes, tmp_path):
    model = follower((0, 0, 2, 2), dtype=torch.float32, **changes)
    save_pretrained(model, tmp_path)
    loaded, _ = load_pretrained(tmp_path, dtype=torch.float32, device="cpu")
    assert loaded.config == model.config
    ids = torch.tensor(ids_for(5, [20]))
    assert torch.equal(loaded(ids), model(ids))
    kept = changes.get("sliding_window", 20)
    assert estimate(tmp_path, 1, 20).kv_cache_bytes == kept * model.config.kv_bytes_per_token(2)


def test_transformers_refuses_what_it_would_fill_with_random_numbers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    save_pretrained(follower((0, 0, 2, 2), dtype=torch.float32), tmp_path)
    with pytest.raises((ValueError, KeyError), match="kvlab_llama"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_without_followers_is_saved_as_before():
    plain = hf_config(toy().config)
    assert plain["model_type"] == "llama" and "kv_owner" not in plain
    assert hf_config(toy(kv_owner=(0, 1)).config) == plain


def test_files_that_contradict_themselves():
    good = json.loads(json.dumps(hf_config(follower((0, 0, 2, 2)).config)))
    for owners, message in (
        ([0, 0, 2], "kv_owner names 3 layers, the model has 4"),
        ([0, 1, 2, 4], "layer 3 cannot use the keys of layer 4"),
        ("0022", "kv_owner='0022' must name a layer for each layer"),
        ([0, 0, 2, 1.0], "kv_owner of layer 3=1.0 must be an int"),
    ):
        for read in (model_config, architecture):
            with pytest.raises(ConfigError, match=message):
                read({**good, "kv_owner": owners})


# ---- refusals


@pytest.mark.parametrize(
    "owners,error,message",
    [
        ((0, 0, 2), ValueError, "kv_owner names 3 layers, the model has 4"),
        ((0, 2, 2, 2), ValueError, "layer 1 cannot use the keys of layer 2, which comes after it"),
        ((0, 0, 1, 1), ValueError, "layer 2 follows layer 1, which follows 0: name that one"),
        ((0, 0, -1, 2), ValueError, "kv_owner of layer 2=-1 must be at least 0"),
        ((0, 0, 2.0, 2), TypeError, "kv_owner of layer 2=2.0 must be an int"),
        ((0, True, 2, 2), TypeError, "kv_owner of layer 1=True must be an int"),
        (2, TypeError, "kv_owner=2 must name a layer for each layer"),
        ("0022", TypeError, "kv_owner='0022' must name a layer for each layer"),
    ],
    ids=str,
)
def test_maps_that_cannot_be(owners, error, message):
    with pytest.raises(error, match=message):
        ModelConfig(kv_owner=owners)


def test_layers_of_two_types_do_not_share():
    types = ("sliding_attention", "full_attention", "full_attention", "full_attention")
    with pytest.raises(ValueError, match="layer 1 is of type 'full_attention' and follows layer 0, of type 'sliding"):
        ModelConfig(sliding_window=4, layer_types=types, kv_owner=(0, 0, 2, 2))
