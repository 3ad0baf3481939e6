"""Which tokens are kept: the notes are what the cache's own views show, at every step."""

import pytest
import torch

from kvlab.caches import make_cache
from kvlab.check import tiny_model
from kvlab.kept import Kept, heaviest, held_positions
from kvlab.quality import evaluate

IDS = torch.randint(0, 499, (40,), generator=torch.Generator().manual_seed(0)).tolist()
UNEVEN = [[6, 9], [12, 5]]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def views(model, kind, **options):
    """What attention is shown after the last token: {layer: positions of each head}, from the views themselves."""
    cache, seen = make_cache(kind, model, 1, 40, **options), {}
    append = cache.append

    def spying(layer, k, v, pos):
        view = append(layer, k, v, pos)
        seen[layer] = view.pos.expand(1, 2, -1)[0] if view.pos.dim() == 3 else view.pos.expand(2, -1)
        return view

    cache.append = spying
    with torch.no_grad():
        model(torch.tensor([IDS]), cache)
    return cache, {layer: [sorted(p for p in head.tolist() if p >= 0) for head in pos] for layer, pos in seen.items()}


@pytest.mark.parametrize("kind", ["heavy_hitter", "random", "first_last"])
@pytest.mark.parametrize("budget", [8, UNEVEN])
def test_what_is_held_is_what_attention_saw_last(model, kind, budget):
    options = {"first": 2} if kind == "first_last" else {}
    cache, seen = views(model, kind, budget=budget, **options)
    held = held_positions(cache)
    assert held.shape == (2, 2, 8 if budget == 8 else 12)
    for layer in range(2):
        for head in range(2):
            assert sorted(p for p in held[layer, head].tolist() if p >= 0) == seen[layer][head]
    if kind == "first_last":
        assert {0, 1, 39} <= set(held[0, 0].tolist())


def test_a_watched_cache_is_the_same_cache(model):
    options = {"budget": 8}
    kept = Kept("heavy_hitter", every=4, **options)
    found = evaluate(model, IDS, {"plain": ("heavy_hitter", options), "watched": kept}, progress=False)
    assert torch.equal(found["plain"].nll, found["watched"].nll)
    assert kept.lengths == list(range(8, 41, 4)) and len(kept.notes) == len(kept.lengths)
    assert torch.equal(kept.notes[-1], held_positions(kept.cache))
    evaluate(model, IDS, {"again": kept}, progress=False)
    assert len(kept.notes) == 9  # a second run begins anew


def test_the_grid_counts_tokens(model):
    kept = Kept("first_last", every=4, budget=8, first=2)
    evaluate(model, IDS, {"kept": kept}, progress=False)
    rows, wide = kept.grid(0, 1, cells=20)
    assert wide == 2 and len(rows) == 20 and all(len(row) == len(kept.lengths) for row in rows)
    for column, n in enumerate(kept.lengths):
        held = {0, 1, *range(n - 6, n)}
        for i, row in enumerate(rows):
            read = [p for p in (2 * i, 2 * i + 1) if p < n]
            assert row[column] == (sum(p in held for p in read) / len(read) if read else None)


def test_the_heaviest_tokens_are_those_with_the_largest_sums(model):
    cache = make_cache("heavy_hitter", model, 1, 40, budget=UNEVEN)
    with torch.no_grad():
        model(torch.tensor([IDS]), cache)
    for layer, head in ((0, 0), (1, 0), (1, 1)):
        found = heaviest(cache, layer, head, 4)
        sums = [s for _, s in found]
        assert len(found) == 4 and sums == sorted(sums, reverse=True) and sums[-1] > 0
        assert {p for p, _ in found} <= set(held_positions(cache)[layer, head].tolist())
    assert len(heaviest(cache, 1, 1, 99)) == 5  # all that the head holds


def test_what_cannot_be_noted_is_refused(model):
    with pytest.raises(ValueError, match="'full' evicts nothing"):
        evaluate(model, IDS, {"x": Kept("full")}, progress=False)
    with pytest.raises(ValueError, match="every=0"):
        Kept("random", every=0)
    with pytest.raises(ValueError, match="nothing has been noted"):
        Kept("random").grid(0, 0)
