"""Budgets by measured attention: what is measured, and how one total is shared out."""

import pytest
import torch
from oracles import ids_for, toy

from kvlab import make_cache
from kvlab.budgets import attention_by_rank, share_budget

MODEL = toy(seed=6)
TEXT = ids_for(0, [24])[0]


def ranked_by_hand(model, ids, after, block):
    """The same from the attention weights of one pass, block by block."""
    seen = {}

    def attend(q, view, mask, want_weights=False, right=torch.softmax):
        scores = (q @ view.k.repeat_interleave(q.shape[1] // view.k.shape[1], 1).transpose(2, 3)) / q.shape[-1] ** 0.5
        weights = right(scores.masked_fill(~mask, float("-inf")), -1)
        seen[len(seen)] = weights[0]
        return weights @ view.v.repeat_interleave(q.shape[1] // view.v.shape[1], 1)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("kvlab.model.attend", attend)
        model(torch.tensor([ids]))
    c = model.config
    found = torch.zeros(c.num_hidden_layers, c.num_key_value_heads, len(ids), dtype=torch.float64)
    for layer, weights in seen.items():
        grouped = weights.view(c.num_key_value_heads, -1, len(ids), len(ids)).sum(1)
        for head in range(c.num_key_value_heads):
            for start in range(0, len(ids), block):
                queries = range(max(after, start), min(start + block, len(ids)))
                drawn = sum((grouped[head, p] for p in queries), torch.zeros(len(ids)))
                found[layer, head] += torch.tensor(sorted(drawn.tolist(), reverse=True), dtype=torch.float64)
    return found / found.sum(-1, keepdim=True)


@pytest.mark.parametrize("after", [0, 10])
@pytest.mark.parametrize("block", [1, 5, 64])
def test_the_shares_are_those_of_the_attention_weights(after, block):
    got = attention_by_rank(MODEL, TEXT, after, block)
    torch.testing.assert_close(got, ranked_by_hand(MODEL, TEXT, after, block), rtol=0, atol=1e-12)
    assert got.sum(-1).allclose(torch.ones(2, 2, dtype=torch.float64))
    assert (got.diff(dim=-1) <= 1e-15).all()


def test_a_layer_that_follows_another_repeats_its_owner():
    model = toy(seed=6, num_hidden_layers=4, kv_owner=(0, 0, 2, 2))
    by_rank = attention_by_rank(model, TEXT)
    assert torch.equal(by_rank[0], by_rank[1]) and not torch.equal(by_rank[0], by_rank[2])
    table = share_budget(by_rank, 6, owners=model.config.kv_owner)
    assert table[0] == table[1] and table[2] == table[3] and sum(table[0] + table[2]) == 6 * 4
    make_cache("heavy_hitter", model, budget=table)


@pytest.mark.parametrize("across", ["heads", "layers"])
@pytest.mark.parametrize("floor", [0, 0.3, 0.5, 1, 1.0])
@pytest.mark.parametrize("budget", [1, 2, 7, 24])
def test_the_total_is_that_of_the_same_budget_everywhere(budget, floor, across):
    table = share_budget(attention_by_rank(MODEL, TEXT), budget, floor, across)
    assert sum(map(sum, table)) == budget * 4 and len(table) == len(table[0]) == 2
    assert across == "layers" or [sum(row) for row in table] == [2 * budget] * 2
    assert min(map(min, table)) >= max(1, int(floor * budget))
    uniform, shared = (make_cache("heavy_hitter", MODEL, 1, 99, budget=b) for b in (budget, table))
    with torch.no_grad():
        for cache in (uniform, shared):
            cache.append(0, *torch.zeros(2, 1, 2, 1, 8), torch.tensor([[0]]))
            cache.append(1, *torch.zeros(2, 1, 2, 1, 8), torch.tensor([[0]]))
    assert uniform.nbytes == shared.nbytes


def test_heads_that_look_everywhere_get_what_the_others_do_not_need():
    narrow = [0.9, 0.1, 0, 0, 0, 0, 0, 0]
    wide = [0.2, 0.15, 0.15, 0.15, 0.15, 0.1, 0.06, 0.04]
    by_rank = torch.tensor([[narrow, wide], [narrow, narrow]], dtype=torch.float64)
    assert share_budget(by_rank, 4, floor=0.5) == [[2, 6], [4, 4]]
    assert share_budget(by_rank, 3, floor=0.7, across="layers") == [[2, 6], [2, 2]]
    assert share_budget(by_rank, 3, floor=1.0) == [[3, 3], [3, 3]]
    alike = torch.full((2, 2, 8), 1 / 8, dtype=torch.float64)
    for across in ("heads", "layers"):  # of equal ones the lower rank: nobody is favoured
        assert share_budget(alike, 5, floor=0, across=across) == [[5, 5], [5, 5]]


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda x: share_budget(x, 0), "budget=0 must be at least 1"),
        (lambda x: share_budget(x, 9), "by_rank has 8 ranks: measure on a text of at least budget=9 tokens"),
        (lambda x: share_budget(x, 4, 1.5), "floor=1.5 must be a share of the budget"),
        (lambda x: share_budget(x, 4, across="all"), "across='all' must be 'heads' .* or 'layers'"),
        (lambda x: attention_by_rank(MODEL, TEXT, after=24), "after=24 leaves none of 24 tokens"),
        (lambda x: attention_by_rank(MODEL, TEXT, block=0), "block=0 must be at least 1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 2, 8) / 8)
