"""rewind, fork and reorder of every cache, held against feeding the same text afresh."""

import pytest
import torch
from cases import SETUPS, check_fork, name_of, stored_tensors
from eviction_oracle import EVICTING
from oracles import assert_logits, call, dense_logits, feed, ids_for, rule_of, toy

from kvlab.caches import KVCache, NotOffered, RewindError, make_cache

MODEL = toy(seed=3)
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)


def fed(setup, rows, schedule=None):
    cache = make_cache(setup[0], MODEL, len(rows), 40, **setup[1])
    feed(MODEL, cache, rows, schedule or [[len(row) for row in rows]])
    return cache


def assert_goes_on(cache, setup, texts, new):
    """Feeding new[b] to row b gives what texts[b] + new[b] would."""
    got = call(MODEL, cache, new, [len(t) for t in texts])
    for b, text in enumerate(texts):
        want = dense_logits(MODEL, text + new[b], rule_of(*setup))[len(text) :]
        assert_logits(got[b], want, what=f"row {b}")


def largest_rewind(setup, n: int) -> int:
    kind, o = setup
    if kind == "sliding":
        slots = o["window"] + o.get("sinks", 0)
        return n if n <= slots else 1
    if kind == "heavy_hitter":
        return 0  # scores are sums
    if kind in EVICTING:
        least = o["budget"] if isinstance(o["budget"], int) else min(map(min, o["budget"]))
        return n if n <= least else 1
    if kind == "quantized":
        G, R = o["group_size"], o["residual_length"]
        sealed = max(0, (n - 1 - R) // G * G)  # fed one by one: sealed at the last token's append
        return n - (sealed + R if sealed else 0)
    return n


@every_setup
@pytest.mark.parametrize("n", [1, 5, 6, 7, 13])
def test_rewind_then_other_tokens(setup, n):
    """For every number of tokens to forget: either exact, or refused with the largest number that is."""
    text, new = ids_for(n, [n])[0], ids_for(n + 50, [4])[0]
    cache = fed(setup, [text], [[1]] * n)
    largest = largest_rewind(setup, n)
    for x in range(n + 2):
        fork = cache.fork()
        if x > largest:
            with pytest.raises(RewindError, match=f"at most {largest} of them, not {x}") as error:
                fork.rewind(x)
            assert error.value.largest == largest
            assert_goes_on(fork, setup, [text], [new])  # as if nobody had asked
        else:
            fork.rewind(x)
            assert fork.lengths == [n - x]
            assert_goes_on(fork, setup, [text[: n - x]], [new])


@every_setup
def test_rewind_by_row_and_twice(setup):
    rows, new = ids_for(4, [9, 6]), ids_for(5, [3, 5])
    cache = fed(setup, rows)
    by = [min(1, cache._largest_rewind(0)), 0]
    cache.rewind(by)
    cache.rewind(0)
    kept = [row[: len(row) - x] for row, x in zip(rows, by)]
    assert_goes_on(cache, setup, kept, new)


@every_setup
def test_rewind_to_nothing(setup):
    """A text that no rule has touched yet can be forgotten altogether."""
    cache = fed(setup, [[5, 6]])
    if setup[0] == "heavy_hitter":
        with pytest.raises(RewindError, match="row 0 has 2 tokens and can forget at most 0 of them, not 2"):
            cache.rewind(2)
        return
    cache.rewind(2)
    assert cache.lengths == [0] and cache.nbytes_in_use == 0
    assert_goes_on(cache, setup, [[]], ids_for(6, [9]))


@every_setup
def test_rewind_refuses_nonsense_and_changes_nothing(setup):
    rows = ids_for(7, [3, 2])
    cache = fed(setup, rows)
    with pytest.raises(ValueError, match="rewind by -1 tokens: n must be 0 or more"):
        cache.rewind(-1)
    with pytest.raises(ValueError, match="rewind names 3 rows, the cache has 2"):
        cache.rewind([0, 0, 0])
    for nonsense in (1.5, None, "a", [0.5, 0]):
        with pytest.raises(TypeError, match="rewind: .* must be a list of ints"):
            cache.rewind(nonsense)
        with pytest.raises(TypeError, match="reorder: .* must be a list of ints"):
            cache.reorder(nonsense)  # int(0.5) would be row 0
    with pytest.raises(RewindError, match="row 1 has 2 tokens"):
        cache.rewind([0 if setup[0] == "heavy_hitter" else 1, 3])  # row 0 could, row 1 cannot: neither moves
    assert cache.lengths == [3, 2]
    assert_goes_on(cache, setup, rows, ids_for(8, [2, 2]))


@every_setup
def test_fork_leaves_the_parent_as_it_was(setup):
    rows = ids_for(9, [9, 6])
    cache = fed(setup, rows)
    before = [x.clone() for x in stored_tensors(cache)] if setup[0] != "paged" else None
    twin = cache.fork()
    assert_goes_on(twin, setup, rows, ids_for(10, [8, 8]))
    if before is not None:  # to the bit
        assert all(torch.equal(a, b) for a, b in zip(before, stored_tensors(cache), strict=True))
    assert cache.lengths == [9, 6]
    assert_goes_on(cache, setup, rows, ids_for(11, [8, 8]))
    if setup[0] == "paged":
        cache.pool.check([row.table for one in (cache, twin) for row in one.rows])


@pytest.mark.parametrize("kind", ["growing", "full", "paged"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8])
def test_a_fork_and_its_parent_go_different_ways(kind, tokens):
    check_fork(lambda: make_cache(kind, MODEL, 1, 32, **({"block_size": 4} if kind == "paged" else {})), MODEL, tokens)


@every_setup
@pytest.mark.parametrize("rows", [[1, 0, 2], [2, 2, 0], [1], [0, 1, 2, 0, 1, 2]], ids=str)
def test_reorder_moves_drops_and_repeats_rows(setup, rows):
    texts = ids_for(12, [9, 6, 8])
    cache = fed(setup, texts)
    cache.reorder(rows)
    texts = [texts[r] for r in rows]
    assert cache.lengths == [len(t) for t in texts] and cache.batch_size == len(rows)
    assert_goes_on(cache, setup, texts, ids_for(13, [3] * len(rows)))
    if setup[0] == "paged":
        cache.pool.check([row.table for row in cache.rows])


@every_setup
def test_reorder_refuses_nonsense(setup):
    cache = fed(setup, ids_for(14, [3, 2]))
    with pytest.raises(ValueError, match="reorder: row 2 does not exist; rows run from 0 to 1"):
        cache.reorder([0, 2])
    with pytest.raises(ValueError, match="keep at least one row"):
        cache.reorder([])
    assert cache.lengths == [3, 2]


@every_setup
def test_bytes_do_not_stay_behind(setup):
    """After dropping two of three rows a cache holds what one row of it holds; views would pin the old tensors."""
    texts = ids_for(15, [6, 6, 6])
    cache = fed(setup, texts)
    cache.reorder([1])
    alone = fed(setup, [texts[1]])
    if setup[0] != "paged":  # whose pool stays as large as it was made
        assert cache.nbytes_by() == alone.nbytes_by()
        for x in stored_tensors(cache):
            assert x.untyped_storage().nbytes() == x.nbytes or x.numel() == 0 or x.stride()[0] == 0
    assert cache.nbytes_in_use == alone.nbytes_in_use


def test_a_cache_without_an_operation_says_so_by_name():
    class Mine(KVCache):
        pass

    for operation, args in (("rewind", (0,)), ("reorder", ([0],)), ("nbytes_by", ())):
        with pytest.raises(NotOffered, match="Mine does not"):
            getattr(Mine(), operation)(*args)
