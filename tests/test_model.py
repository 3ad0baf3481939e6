"""The GPT without a cache against two references, and what it refuses."""

import pytest
import torch
from oracles import assert_logits, call, causal_logits, dense_logits, ids_for, toy

from kvlab import GPT, ModelConfig, make_cache

SHAPES = [
    {},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 4},
    {"head_dim": 16},
    {"qkv_bias": True},
    {"attention_bias": True, "mlp_bias": True},
    {"tie_word_embeddings": True},
    {"rope_theta": 500.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"num_hidden_layers": 4, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3},
]


def model_for(changes):
    if "rope_scaling" not in changes:
        return toy(**changes)
    model = GPT(ModelConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, **changes)).double()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p *= 8
    return model


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_equals_both_references(changes):
    model, text = model_for(changes), ids_for(0, [19])[0]
    with torch.no_grad():
        got = model(torch.tensor([text]))[0]
    want = causal_logits(model, text)
    assert_logits(got, want)
    assert_logits(got, dense_logits(model, text))
    assert want.std() > 0.1  # not flat, or nothing would be tested


def test_attention_of_the_toys_is_not_flat():
    """Swapping two tokens of the past changes what follows by far more than any tolerance here."""
    model, text = toy(), ids_for(1, [12])[0]
    other = [text[1], text[0], *text[2:]]
    assert (dense_logits(model, text) - dense_logits(model, other))[2:].abs().amax(-1).min() > 1e-2


@pytest.mark.parametrize("types", [None, ("sliding_attention", "full_attention")], ids=str)
@pytest.mark.parametrize("window", [1, 3, 50])
def test_windows_by_layer(types, window):
    changes = {"sliding_window": window, **({"layer_types": types} if types else {})}
    model, text = toy(**changes), ids_for(2, [14])[0]
    with torch.no_grad():
        assert_logits(model(torch.tensor([text]))[0], dense_logits(model, text))


@pytest.mark.parametrize("padding", ["left", "right", "scattered"])
def test_padding_without_a_cache(padding):
    rows = ids_for(3, [9, 4, 1])
    for b, got in enumerate(call(toy(), None, rows, [0, 0, 0], padding)):
        assert_logits(got, causal_logits(toy(), rows[b]))


def test_logits_to_keep():
    model = toy()
    ids = torch.tensor(ids_for(4, [6, 6]))
    with torch.no_grad():
        full = model(ids)
        for n in (1, 2, 6):
            kept = model(ids, logits_to_keep=n)
            assert kept.shape == (2, n, 50)
            assert_logits(kept[1], full[1, -n:], 1e-14)
        assert_logits(model(ids, make_cache("full", model, 2, 8), logits_to_keep=1)[0], full[0, -1:])
    with pytest.raises(ValueError, match="logits_to_keep=-1 must be 0 .all. or a number of columns"):
        model(ids, logits_to_keep=-1)


def test_default_positions_go_on_where_each_row_is():
    model = toy()
    cache = make_cache("full", model, 2, 12)
    with torch.no_grad():
        call(model, cache, [[1, 2, 3], [4]], [0, 0])
        got = model(torch.tensor([[5], [6]]), cache)
    assert_logits(got[0], causal_logits(model, [1, 2, 3, 5])[-1:])
    assert_logits(got[1], causal_logits(model, [4, 6])[-1:])


def test_int32_ids():
    model = toy()
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([[1, 2]], dtype=torch.int32)), model(torch.tensor([[1, 2]])))


@pytest.mark.parametrize(
    "ids,message",
    [
        ([[1, 2]], r"ids must be an integer tensor \(B, T\), not a list"),
        (torch.tensor([1, 2]), r"not torch.int64 of shape \(2,\)"),
        (torch.tensor([[1.0]]), r"not torch.float32 of shape \(1, 1\)"),
        (torch.zeros(1, 0, dtype=torch.int64), r"ids is empty \(shape \(1, 0\)\): there must be at least one token"),
        (torch.zeros(0, 3, dtype=torch.int64), r"ids is empty \(shape \(0, 3\)\)"),
        (torch.tensor([[1, 50]]), "token id 50 is outside the vocabulary: ids run from 0 to 49"),
        (torch.tensor([[-1, 5]]), "token id -1 is outside the vocabulary"),
        (torch.zeros(1, 2, dtype=torch.int64, device="meta"), "ids are on meta, the model is on cpu: move one of them"),
    ],
    ids=[str(i) for i in range(8)],
)
def test_bad_ids_change_nothing(ids, message):
    model = toy()
    cache = make_cache("growing", model, 1)
    call(model, cache, [[7, 8]], [0])
    for one in (None, cache):
        with pytest.raises(ValueError, match=message):
            model(ids, one)
    assert_logits(call(model, cache, [[9]], [2])[0], causal_logits(model, [7, 8, 9])[-1:])


def test_bad_positions():
    with pytest.raises(ValueError, match=r"pos has shape \(1, 2\), ids \(1, 3\): they must agree"):
        toy()(torch.tensor([[1, 2, 3]]), pos=torch.tensor([[0, 1]]))
    for pos in (torch.tensor([[0.0, 1.0]]), [[0, 1]]):
        with pytest.raises(ValueError, match=r"pos must be an integer tensor \(B, T\), not (torch.float32|list)"):
            toy()(torch.tensor([[1, 2]]), pos=pos)


def test_rows_that_the_cache_does_not_have():
    model = toy()
    with pytest.raises(ValueError, match="1 rows of tokens for a cache of 2 rows: make it with batch_size=1"):
        model(torch.tensor([[1, 2]]), make_cache("full", model, 2, 8))  # positions are the cache's: no pos is given


@pytest.mark.parametrize(
    "scaling,lacks",
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "high_freq_factor, low_freq_factor"),
    ],
    ids=str,
)
def test_rope_scaling_that_is_not_complete(scaling, lacks):
    with pytest.raises(ValueError, match=f"rope_scaling=.* lacks {lacks}"):
        GPT(ModelConfig(rope_scaling=scaling))


def test_a_seed_makes_a_model():
    config = ModelConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1)
    a, b, c = GPT(config), GPT(config, seed=0), GPT(config, seed=1)
    assert torch.equal(a.lm_head.weight, b.lm_head.weight) and not torch.equal(a.lm_head.weight, c.lm_head.weight)
    assert 0.015 < a.lm_head.weight.std() < 0.025
    tied = GPT(config.with_(tie_word_embeddings=True))
    assert tied.lm_head.weight is tied.embed_tokens.weight


def test_on_the_meta_device_a_model_has_shapes_and_no_bytes():
    with torch.device("meta"):
        model = GPT(ModelConfig(vocab_size=32000, hidden_size=4096, num_hidden_layers=2, num_attention_heads=32))
    assert sum(p.numel() for p in model.parameters()) > 500e6 and model.device.type == "meta"
