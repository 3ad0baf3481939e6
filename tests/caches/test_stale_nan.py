"""A row is poisoned by numbers that nobody has any more: NaN left in a slot that is shown and masked."""

import copy

import pytest
import torch
from cases import SETUPS, name_of
from oracles import ids_for, toy

from kvlab.caches import PagedCache, RewindError, make_cache

MODEL = toy(seed=4)
NAN = copy.deepcopy(MODEL)
with torch.no_grad():  # a model that overflowed: every key and value is NaN
    for layer in NAN.layers:
        layer.input_layernorm.weight.fill_(float("nan"))
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)


def run(model, cache, ids, lengths):
    """One call; row b takes lengths[b] of its ids -> logits (B, V) behind each row's newest token."""
    pos = cache.next_positions(lengths)
    T = max(lengths)
    padded = [[0] * (T - n) + row[:n] for row, n in zip(ids, lengths)]
    with torch.no_grad():
        return model(torch.tensor(padded), cache, pos=pos)[:, -1]


def can_forget(setup, n):
    """False, with nothing changed, where the cache says that these tokens cannot be taken back."""
    kind, options = setup
    cache = make_cache(kind, MODEL, 2, 30, **options)
    run(MODEL, cache, ids_for(1, [4, 4]), [4, 3])
    run(MODEL, cache, ids_for(9, [3, 3]), n)
    held = list(cache.lengths)
    try:
        cache.rewind(n)
    except RewindError:
        assert cache.lengths == held
        return False
    return True


def one_chunk(setup, n):
    """False where a failed call of n tokens leaves the cache unusable, and it says so, having stored a chunk."""
    kind, options = setup
    cache = make_cache(kind, MODEL, 2, 30, **options)
    run(MODEL, cache, ids_for(1, [4, 4]), [4, 3])
    return cache.max_chunk(max(n)) == max(n)


def after_which(setup, spoil):
    """Logits of ragged steps over caches with equal tokens, one of which `spoil` has filled with NaN and taken back."""
    kind, options = setup
    found = []
    for spoiled in (False, True):
        cache = make_cache(kind, MODEL, 2, 30, **options)
        run(MODEL, cache, ids_for(1, [4, 4]), [4, 3])
        if spoiled:
            spoil(cache)
        assert cache.lengths == [4, 3]
        steps = [run(MODEL, cache, ids_for(s, [3, 3]), n) for s, n in ((2, [1, 1]), (3, [3, 1]), (4, [1, 2]))]
        found.append(torch.stack(steps))
    assert found[1].isfinite().all()
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=0)


@every_setup
@pytest.mark.parametrize("n", [[1, 1], [2, 1], [1, 3]], ids=str)
def test_nan_forgotten_by_rewind(setup, n):
    def spoil(cache):
        run(NAN, cache, ids_for(9, [3, 3]), n)
        cache.rewind(n)

    if can_forget(setup, n):
        after_which(setup, spoil)


@every_setup
def test_nan_of_one_row_forgotten_while_the_other_goes_on(setup):
    kind, options = setup
    bad = copy.deepcopy(MODEL)
    with torch.no_grad():
        bad.embed_tokens.weight[49] = float("nan")  # one token overflows
    steps = []
    for last in (49, 3):
        cache = make_cache(kind, MODEL, 2, 30, **options)
        run(MODEL, cache, ids_for(1, [2, 2]), [2, 2])
        run(bad, cache, [[7], [last]], [1, 1])
        if last == 49 and setup[0] == "heavy_hitter":
            with pytest.raises(RewindError):
                cache.rewind([0, 1])
            return
        cache.rewind([0, 1])
        steps.append(torch.stack([run(MODEL, cache, ids_for(s, [2, 2]), n) for s, n in ((2, [2, 1]), (3, [1, 1]))]))
    assert steps[0].isfinite().all()
    torch.testing.assert_close(steps[0], steps[1], atol=1e-12, rtol=0)


@every_setup
@pytest.mark.parametrize("n", [[1, 1], [2, 1], [1, 3]], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_nan_of_a_step_that_failed(setup, n, layers):
    def spoil(cache):
        block = NAN.layers[layers - 1].mlp
        block.forward = lambda *_: 1 / 0
        try:
            with pytest.raises(ZeroDivisionError):
                run(NAN, cache, ids_for(9, [3, 3]), n)
        finally:
            del block.forward

    if one_chunk(setup, n):
        after_which(setup, spoil)


def test_nan_behind_a_fork_that_was_rewound():
    """Clearing the last block must not touch a block that another row has too."""
    ids, new = torch.tensor(ids_for(1, [7])), torch.tensor(ids_for(2, [1]))
    cache = PagedCache(1, 30, block_size=4)
    with torch.no_grad():
        MODEL(ids[:, :5], cache)
        NAN(ids[:, 5:], cache)  # NaN at 5 and 6
        other = cache.fork()
        cache.rewind(2)
        assert other.pool.k[0].isnan().any()  # still the fork's
        third = cache.fork()
        for one in (cache, third):
            alone = make_cache("full", MODEL, 1, 30)
            MODEL(ids[:, :5], alone)
            torch.testing.assert_close(MODEL(new, one), MODEL(new, alone), atol=1e-12, rtol=0)
            at = one.rows[0].table[-1]
            assert one.pool.k[0][:, at].isfinite().all() and one.pool.v[1][:, at].isfinite().all()
