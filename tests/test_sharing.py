"""Which layers can share: similarity and prices against loops over the dense reference, on toys."""

import math

import pytest
import torch
from oracles import Rule, dense_logits, ids_for, toy

from kvlab import sharing
from kvlab.sharing import Pair, owners_for, price_of_pairs, similarity

MODEL = toy(num_hidden_layers=4, num_key_value_heads=2)
IDS = ids_for(0, [20])[0]


def kept(model, ids):
    """Keys before RoPE and values of each layer, (N, n_kv, D), caught where the projections make them."""
    caught, hooks = {}, []
    for layer, block in enumerate(model.layers):
        for name in "kv":
            if (module := getattr(block.self_attn, f"{name}_proj", None)) is not None:
                hooks.append(
                    module.register_forward_hook(
                        lambda m, i, out, at=(name, layer): caught.update({at: out[0].view(len(ids), -1, 8)})
                    )
                )
    with torch.no_grad():
        model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    return caught


@pytest.mark.parametrize("owners", [None, (0, 1, 0, 3)], ids=str)
def test_similarity_is_the_mean_cosine(owners):
    model = toy(num_hidden_layers=4, **({"kv_owner": owners} if owners else {}))
    caught, layers = kept(model, IDS), model.config.kv_layers
    for name, got in zip("kv", similarity(model, IDS)):
        assert got.shape == (len(layers), len(layers)) and torch.allclose(got, got.T)
        for i, a in enumerate(layers):
            for j, b in enumerate(layers):
                cosines = [
                    float(x @ y / (x.norm() * y.norm()))
                    for t in range(len(IDS))
                    for x, y in zip(caught[name, a][t], caught[name, b][t])
                ]
                assert abs(got[i, j] - sum(cosines) / len(cosines)) < 1e-12
        assert got.diagonal().allclose(torch.ones(len(layers), dtype=torch.float64))


def test_prices_are_those_of_the_dense_model():
    plain = dense_logits(MODEL, IDS)[:-1].log_softmax(-1)
    target = torch.tensor(IDS[1:])[:, None]
    pairs = [(0, 1), (1, 2), (0, 3)]
    for pair, (owner, follower) in zip(price_of_pairs(MODEL, IDS, pairs, chunk=6, progress=False), pairs):
        rule = Rule(owners=tuple(owner if i == follower else i for i in range(4)))
        shared = dense_logits(MODEL, IDS, rule)[:-1].log_softmax(-1)
        assert (pair.owner, pair.follower) == (owner, follower)
        assert abs(pair.kl - float((plain.exp() * (plain - shared)).sum(-1).mean())) < 1e-9
        nll, base = (-float(x.gather(1, target).mean()) for x in (shared, plain))
        assert math.isclose(pair.perplexity_ratio, math.exp(nll - base), rel_tol=1e-9)
        assert pair.top1 == float((shared.argmax(-1) == plain.argmax(-1)).double().mean())
        assert pair.kl > 1e-3  # or nothing would be measured


def test_by_default_every_layer_follows_the_one_before_it():
    got = price_of_pairs(MODEL, IDS, chunk=20, progress=False)
    assert [(p.owner, p.follower) for p in got] == [(0, 1), (1, 2), (2, 3)]
    model = toy(num_hidden_layers=4, kv_owner=(0, 1, 0, 3))
    assert [(p.owner, p.follower) for p in price_of_pairs(model, IDS, progress=False)] == [(0, 1), (1, 3)]


def test_a_layer_that_says_nothing_may_use_any_keys():
    """Its attention goes into a matrix of zeros: sharing costs nothing there, and it comes first in the table."""
    model = toy(num_hidden_layers=4, seed=5)
    weight = model.layers[2].self_attn.o_proj.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.zero_()
        got = price_of_pairs(model, IDS, progress=False)
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    free = got[1]
    assert free.follower == 2 and abs(free.kl) < 1e-12 and free.perplexity_ratio == pytest.approx(1) and free.top1 == 1
    assert owners_for(got, 4, 1) == (0, 1, 1, 3)
    lines = sharing.table(got).splitlines()
    assert lines[1].split()[:2] == ["2", "1"] and len(lines) == 4


def pairs(**kl):
    return [Pair(int(name[1]), int(name[2]), value, 1.0, 1.0) for name, value in kl.items()]


def test_maps_take_the_cheapest_pairs_and_no_chains():
    found = pairs(p01=0.3, p12=0.1, p23=0.2, p34=0.4)
    assert owners_for(found, 5, 0) == (0, 1, 2, 3, 4)
    assert owners_for(found, 5, 1) == (0, 1, 1, 3, 4)
    assert owners_for(found, 5, 2) == (0, 1, 1, 3, 3)  # 2 follows, so 3 cannot follow it; 1 is followed, so it stays
    with pytest.raises(ValueError, match="these pairs let only 2 layers follow another, not 3"):
        owners_for(found, 5, 3)
    more = pairs(p01=0.1, p02=0.2, p13=0.05)
    assert owners_for(more, 4, 2) == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="followers=-1 must be at least 0"):
        owners_for(found, 5, -1)


@pytest.mark.parametrize(
    "asked,error,message",
    [
        ([(1, 0)], ValueError, r"\(1, 0\): the owner must come before its follower"),
        ([(0, 0)], ValueError, r"\(0, 0\): the owner must come before"),
        ([(0, 4)], ValueError, r"\(0, 4\): layer 4 stores no keys and values; those that do are \[0, 1, 2, 3\]"),
        ([(-1, 2)], ValueError, r"layer of \(-1, 2\)=-1 must be at least 0"),
        ([(0, 1.0)], TypeError, r"layer of \(0, 1.0\)=1.0 must be an int"),
        ([3], TypeError, "3 must be a pair"),
        ([], ValueError, "there is no pair to share: 4 of the model's layers"),
    ],
    ids=str,
)
def test_pairs_that_cannot_be(asked, error, message):
    with pytest.raises(error, match=message):
        price_of_pairs(MODEL, IDS, asked, progress=False)


def test_texts_that_cannot_be():
    with pytest.raises(ValueError, match="the text has 1 tokens; there must be at least 2"):
        similarity(MODEL, [3])
    with pytest.raises(TypeError, match="must hold token ids"):
        similarity(MODEL, ["text"])


def test_silence_is_the_model_without_that_layers_attention():
    """The control: o_proj of zeros by hand, and the reference is the model as it was."""
    plain = dense_logits(MODEL, IDS)[:-1].log_softmax(-1)
    got = sharing.price_of_silence(MODEL, IDS, chunk=6, progress=False)
    assert [(p.owner, p.follower) for p in got] == [(None, 1), (None, 2), (None, 3)]
    for p in got:
        weight = MODEL.layers[p.follower].self_attn.o_proj.weight
        saved = weight.detach().clone()
        try:
            with torch.no_grad():
                weight.zero_()
            silent = dense_logits(MODEL, IDS)[:-1].log_softmax(-1)
        finally:
            with torch.no_grad():
                weight.copy_(saved)
        assert abs(p.kl - float((plain.exp() * (plain - silent)).sum(-1).mean())) < 1e-9 and p.kl > 1e-3
    with torch.no_grad():
        assert torch.allclose(MODEL(torch.tensor([IDS]))[0, :-1].log_softmax(-1), plain, atol=1e-12)  # no hook is left
    assert owners_for(got, 4, 0) == (0, 1, 2, 3)
    with pytest.raises(ValueError, match="only 0 layers follow"):
        owners_for(got, 4, 1)
    assert sharing.table(got).splitlines()[1].split()[1] == "-"
    with pytest.raises(ValueError, match="layer 4 is not there: the model's layers run from 0 to 3"):
        sharing.price_of_silence(MODEL, IDS, [4], progress=False)
