"""The block pool's books and content: sharing, copy on write, prefixes, exhaustion, and a walk of 1,000 operations."""

import numpy as np
import pytest
import torch
from cases import check_prefix, free_everything
from oracles import assert_logits, call, dense_logits, feed, ids_for, in_chunks, toy

from kvlab.caches import BlockPool, PagedCache, PoolExhausted, make_cache
from kvlab.caches.row import Row

MODEL = toy(seed=5, vocab_size=50)


def paged(B=1, max_length=64, **options):
    return make_cache("paged", MODEL, B, max_length, **options)


def tables(*caches):
    return [row.table for cache in caches for row in cache.rows]


def own(text: list[int]) -> torch.Tensor:
    """Logits of the model without a cache (which test_properties holds against the dense reference)."""
    with torch.no_grad():
        return MODEL(torch.tensor([text]))[0]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_every_length_around_block_boundaries(block_size, chunk):
    """Lengths 1 .. 3 blocks + 1, one by one, the books checked after each step."""
    text = ids_for(0, [3 * block_size + 1])[0]
    for n in range(1, len(text) + 1):
        cache, got = paged(block_size=block_size), []
        for start in range(0, n, chunk):
            got += call(MODEL, cache, [text[start : min(n, start + chunk)]], [start])
            cache.pool.check(tables(cache))
            done = min(n, start + chunk)
            assert len(cache.rows[0].table) == -(-done // block_size) == cache.pool.used_blocks
        assert_logits(torch.cat(got), own(text[:n]))
        free_everything(cache)


def test_waste_is_under_one_block_a_row():
    cache = paged(3, block_size=4)
    feed(MODEL, cache, ids_for(1, [9, 1, 4]), [[9, 1, 4]])
    per_token = cache.pool.block_bytes // 4
    assert cache.nbytes_in_use == (12 + 4 + 4) * per_token
    assert cache.nbytes_in_use - 14 * per_token < 3 * cache.pool.block_bytes


# ---- copy on write


def test_shared_blocks_are_copied_once_for_all_owners_but_the_last():
    cache = paged(block_size=4, num_blocks=5)
    text = ids_for(2, [6])[0]
    feed(MODEL, cache, [text], [[6]])
    assert cache.fork_row(0) == 1 and cache.fork_row(0) == 2
    assert cache.pool.used_blocks == 2 and cache.nbytes_in_use == 2 * cache.pool.block_bytes
    before = cache.bytes_copied
    # three rows write into their common second block: two copies, the last owner keeps it. 2 + 2 blocks, one still free
    got = call(MODEL, cache, [[1], [2], [3]], [6, 6, 6])
    assert cache.pool.used_blocks == 4
    gathered = MODEL.config.num_hidden_layers * 3 * 2 * 4 * cache.pool.block_bytes // 4 // 2
    assert cache.bytes_copied - before == gathered + 2 * cache.pool.block_bytes
    for b, token in enumerate((1, 2, 3)):
        assert_logits(got[b], own([*text, token])[-1:])
    cache.pool.check(tables(cache))
    free_everything(cache)


def test_a_full_shared_block_is_never_copied():
    cache = paged(block_size=4)
    text = ids_for(3, [8])[0]
    feed(MODEL, cache, [text], [[8]])
    cache.fork_row(0)
    first = list(cache.rows[0].table)
    call(MODEL, cache, [[1], [2]], [8, 8])
    assert cache.rows[0].table[:2] == cache.rows[1].table[:2] == first
    assert cache.rows[0].table[2] != cache.rows[1].table[2]


def test_rewind_into_a_shared_block_then_write():
    """The other owner is longer; what it wrote there must stay."""
    cache = paged(block_size=4)
    text = ids_for(4, [7])[0]
    feed(MODEL, cache, [text], [[7]])
    cache.fork_row(0)
    cache.rewind([0, 2])
    got = call(MODEL, cache, [[], [9, 9]], [7, 5])[1]
    assert_logits(got, own(text[:5] + [9, 9])[5:])
    got = call(MODEL, cache, [[1], []], [7, 7])[0]
    assert_logits(got, own(text + [1])[7:])
    cache.pool.check(tables(cache))


# ---- prefixes


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_equal_blocks_after_another_prefix_are_not_mistaken(block_size):
    check_prefix(MODEL, block_size)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_prompt_of_whole_blocks_matches_all_but_the_last(blocks):
    cache = paged(block_size=4)
    text = ids_for(5, [4 * blocks])[0]
    feed(MODEL, cache, [text], [[len(text)]])
    cache.commit(0, text)
    row = cache.add_row()
    n = cache.match_prefix(row, text)
    assert n == 4 * (blocks - 1) < len(text)
    got = call(MODEL, cache, [[], text[n:]], [len(text), n])[1]
    assert_logits(got, own(text)[n:])
    assert cache.rows[0].table[: blocks - 1] == cache.rows[1].table[: blocks - 1]
    free_everything(cache)


def test_a_freed_prefix_is_found_until_its_blocks_are_needed():
    cache = paged(block_size=4, num_blocks=4)
    text = ids_for(6, [9])[0]
    feed(MODEL, cache, [text], [[9]])
    cache.commit(0, text)
    cache.add_row()
    cache.free_row(0)
    assert cache.pool.used_blocks == 0
    assert cache.match_prefix(0, text) == 8 and cache.pool.used_blocks == 2
    assert_logits(call(MODEL, cache, [text[8:]], [8])[0], own(text)[8:])
    cache.free_row(0)
    cache.add_row()
    other = ids_for(7, [16])[0]  # takes all four blocks
    assert_logits(call(MODEL, cache, [other], [0])[0], own(other))
    cache.add_row()
    assert cache.match_prefix(1, text) == 0
    assert cache.pool.key_of == {} and cache.pool.block_of == {}


def test_a_block_that_is_written_again_is_no_longer_found():
    """Rewound into a registered block and written to: the old text must not be found there."""
    cache = paged(block_size=4)
    text = ids_for(8, [8])[0]
    feed(MODEL, cache, [text], [[8]])
    cache.commit(0, text)
    cache.rewind(1)
    call(MODEL, cache, [[(text[7] + 1) % 50]], [7])
    cache.add_row()
    assert cache.match_prefix(1, [*text, 1]) == 4
    cache.pool.check(tables(cache))


def test_two_caches_over_one_pool_share_prefixes():
    pool = BlockPool(16, 4)
    one, two = PagedCache(1, pool=pool), PagedCache(1, pool=pool)
    text = ids_for(9, [11])[0]
    feed(MODEL, one, [text], [[11]])
    one.commit(0, text)
    assert two.match_prefix(0, text) == 8
    assert_logits(call(MODEL, two, [text[8:]], [8])[0], own(text)[8:])
    pool.check(tables(one, two))
    assert pool.used_blocks == 3 + 1


def test_a_dropped_cache_gives_its_blocks_back():
    cache = paged(block_size=4)
    feed(MODEL, cache, ids_for(10, [6]), [[6]])
    twin = cache.fork()
    call(MODEL, twin, [[1, 2, 3]], [6])
    assert cache.pool.used_blocks == 4
    del twin
    assert cache.pool.used_blocks == 2
    cache.pool.check(tables(cache))


# ---- rows that somebody else owns


def test_any_rows_make_a_batch_for_a_step():
    """Three rows of one owner, run two at a time in changing company: each says what it says alone."""
    pool = BlockPool(20, 4)
    rows, texts = [Row(pool) for _ in range(3)], ids_for(17, [11, 11, 11])
    done = [0, 0, 0]
    for together, n in (([0, 1], 3), ([2], 5), ([1, 2], 1), ([2, 0], 4), ([0, 1, 2], 1)):
        cache = PagedCache.over([rows[r] for r in together])
        new = [texts[r][done[r] : done[r] + n] for r in together]
        got = call(MODEL, cache, new, [done[r] for r in together])
        for b, r in enumerate(together):
            done[r] += n
            assert_logits(got[b], own(texts[r][: done[r]])[-n:])
        del cache  # the rows stay their owner's
        assert [row.length for row in rows] == done
        pool.check([row.table for row in rows])
        assert pool.used_blocks == sum(-(-n // 4) for n in done)


def test_slots_may_be_taken_before_the_step():
    """A scheduler grows a row first, copy on write included; the step then finds all that it needs."""
    pool, text = BlockPool(6, 4), ids_for(18, [9])[0]
    row = Row(pool)
    call(MODEL, PagedCache.over([row]), [text[:6]], [0])
    twin = row.copy()
    assert row.cost(9) == 2 and row.grow(9) == (1, (1, twin.table[1], pool.block_bytes))
    assert row.cost(9) == 0 and row.grow(9) == (0, None) and twin.cost(7) == 0
    table = list(row.table)
    cache = PagedCache.over([row])
    assert_logits(call(MODEL, cache, [text[6:]], [6])[0], own(text)[6:])
    assert row.table == table and pool.used_blocks == 4
    other = call(MODEL, PagedCache.over([twin]), [[1]], [6])[0]
    assert_logits(other, own([*text[:6], 1])[6:])
    pool.check([row.table, twin.table])


# ---- exhaustion


def test_an_exhausted_pool_leaves_every_row_as_it_was():
    cache = paged(2, block_size=4, num_blocks=3)
    texts = ids_for(11, [6, 3])
    feed(MODEL, cache, texts, [[6, 3]])
    before = [list(t) for t in tables(cache)], list(cache.pool.ref), list(cache.pool.free)
    for new in ([[1, 2, 3], [1]], [[1], [1, 2]], [[1] * 20, []]):
        with pytest.raises(
            PoolExhausted, match=r"more blocks of 4 tokens are needed and 0 of 3 are free: free a row, or"
        ):
            call(MODEL, cache, new, [6, 3])
        assert (tables(cache), list(cache.pool.ref), list(cache.pool.free)) == before
    got = call(MODEL, cache, [[1, 2], [1]], [6, 3])  # what still fits goes on
    for b, new in enumerate(([1, 2], [1])):
        assert_logits(got[b], own(texts[b] + new)[len(texts[b]) :])
    cache.free_row(0)  # the way out that the message names
    assert_logits(call(MODEL, cache, [[5] * 4], [4])[0], own(texts[1] + [1] + [5] * 4)[4:])


def test_copy_on_write_counts_when_the_pool_is_full():
    cache = paged(block_size=4, num_blocks=2)
    feed(MODEL, cache, ids_for(12, [6]), [[6]])
    cache.fork_row(0)
    with pytest.raises(PoolExhausted, match="1 more blocks of 4 tokens are needed and 0 of 2 are free"):
        call(MODEL, cache, [[1], [2]], [6, 6])
    cache.free_row(1)
    call(MODEL, cache, [[1]], [6])


def test_the_books_complain():
    """check() finds each kind of error that it is there for."""

    def books():
        cache = paged(block_size=4, num_blocks=4)
        text = ids_for(13, [8])[0]
        feed(MODEL, cache, [text], [[8]])
        cache.commit(0, text)
        cache.pool.check(tables(cache))
        return cache

    cache = books()
    with pytest.raises(RuntimeError, match="reference count 1, but 0 table entries"):
        cache.pool.check([])
    cache = books()
    cache.pool.ref[0] += 1
    with pytest.raises(RuntimeError, match="block 0 has reference count 2, but 1"):
        cache.pool.check(tables(cache))
    cache = books()
    cache.pool.free[0] = None
    with pytest.raises(RuntimeError, match="block 0 has reference count 1 and is in the free list"):
        cache.pool.check(tables(cache))
    cache = books()
    del cache.pool.free[3]
    with pytest.raises(RuntimeError, match="block 3 has reference count 0 and is not in the free list"):
        cache.pool.check(tables(cache))
    cache = books()
    cache.pool.key_of[0], cache.pool.key_of[1] = cache.pool.key_of[1], cache.pool.key_of[0]
    with pytest.raises(RuntimeError, match="registered under a prefix that names another block"):
        cache.pool.check(tables(cache))
    cache = books()
    del cache.pool.key_of[0]
    with pytest.raises(RuntimeError, match="2 prefixes are registered for 1 blocks"):
        cache.pool.check(tables(cache))
    with pytest.raises(RuntimeError, match="released once more than it was shared"):
        cache.pool.release(3)


def test_the_chain_depends_on_every_token_before():
    chain = BlockPool.chain
    a, b = chain(b"", [1, 2]), chain(b"", [1, 3])
    assert len({a, b, chain(a, [5, 6]), chain(b, [5, 6]), chain(a, [6, 5]), chain(b"", [5, 6])}) == 6
    assert chain(b"", [1, 256]) != chain(b"", [257, 0])  # no token runs into the next


# ---- a walk


def test_a_random_walk_of_1000_operations():
    """Rows come, go, fork, forget and share; after each step the books balance, and every logit is the row's own."""
    rng = np.random.default_rng(0)
    pool = BlockPool(40, 4)
    caches = [PagedCache(2, pool=pool)]
    texts: list[list[list[int]]] = [[[], []]]
    openings = ids_for(14, [8, 9, 13])  # few, so that prefixes meet
    openings[1][:4] = openings[0][:4]
    done: dict[str, int] = {}

    def check():
        pool.check(tables(*caches))
        assert pool.used_blocks == len({b for t in tables(*caches) for b in t})
        for cache, held in zip(caches, texts):
            assert cache.lengths == [len(t) for t in held]

    for _ in range(1000):
        c = int(rng.integers(len(caches)))
        cache, held = caches[c], texts[c]
        b = int(rng.integers(len(held)))
        operation = rng.choice(
            ["append"] * 8
            + ["add_row", "fork_row", "free_row", "rewind", "reorder", "match", "match", "commit", "fork"]
        )
        try:
            if operation == "append":
                new = [rng.integers(0, 50, int(rng.choice([0, 1, 1, 3, 6]))).tolist() for _ in held]
                new[b] = new[b] or [3]
                got = call(MODEL, cache, new, [len(t) for t in held])
                for r, tokens in enumerate(new):
                    held[r] = held[r] + tokens
                    if tokens:
                        assert_logits(got[r], own(held[r])[-len(tokens) :], what=f"row {r}")
            elif operation == "add_row" and len(held) < 5:
                assert cache.add_row() == len(held)
                held.append([])
            elif operation == "fork_row" and len(held) < 5:
                assert cache.fork_row(b) == len(held)
                held.append(held[b])
            elif operation == "free_row" and len(held) > 1:
                cache.free_row(b)
                del held[b]
            elif operation == "rewind":
                n = [int(rng.integers(0, len(t) + 1)) if rng.integers(2) else 0 for t in held]
                cache.rewind(n)
                texts[c] = [t[: len(t) - x] for t, x in zip(held, n)]
            elif operation == "reorder":
                rows = rng.integers(0, len(held), int(rng.integers(1, 4))).tolist()
                cache.reorder(rows)
                texts[c] = [held[r] for r in rows]
            elif operation == "match":
                if held[b]:
                    cache.free_row(b)
                    del held[b]
                    b = cache.add_row()
                    held.append([])
                text = [*openings[int(rng.integers(3))], 5]
                n = cache.match_prefix(b, text)
                assert n % 4 == 0 and n < len(text)
                start = n
                new = [[] for _ in held]
                new[b] = text[n:]
                held[b] = text[:n]
                got = call(MODEL, cache, new, [len(t) for t in held])[b]
                held[b] = text
                assert_logits(got, own(text)[start:], what="after a match")
                done["matched"] = done.get("matched", 0) + (n > 0)
            elif operation == "commit":
                cache.commit(b, [*held[b], 1])
            elif operation == "fork":
                if len(caches) < 3:
                    caches.append(cache.fork())
                    texts.append(list(held))
                else:
                    victim = caches.pop()
                    texts.pop()
                    while victim.rows:
                        victim.free_row(0)
            else:
                continue
            done[str(operation)] = done.get(str(operation), 0) + 1
        except PoolExhausted:
            done["exhausted"] = done.get("exhausted", 0) + 1
            check()
            longest = max(range(len(held)), key=lambda r: len(held[r]))  # make room
            if len(held) > 1:
                cache.free_row(longest)
                del held[longest]
            else:
                cache.rewind(len(held[0]))
                held[0] = []
        check()
    assert (
        min(done.get(name, 0) for name in ("append", "fork_row", "rewind", "reorder", "match", "commit", "fork")) >= 20
    )
    assert done["exhausted"] >= 5 and done["matched"] >= 10
    for cache in caches:
        while cache.rows:
            cache.free_row(0)
    pool.check([])
    assert pool.used_blocks == 0


# ---- bad input


def test_bad_input():
    with pytest.raises(ValueError, match="num_blocks=3 and a pool, which has its own 4"):
        PagedCache(1, num_blocks=3, pool=BlockPool(4))
    with pytest.raises(ValueError, match="block_size=0 must be at least 1"):
        paged(block_size=0)
    with pytest.raises(TypeError, match="block_size=2.5 must be an int"):
        paged(block_size=2.5)
    with pytest.raises(ValueError, match="num_blocks=0 must be at least 1"):
        paged(num_blocks=0)
    cache = paged(block_size=4)
    text = ids_for(15, [6])[0]
    feed(MODEL, cache, [text], [[6]])
    for operation in (
        cache.fork_row,
        cache.free_row,
        lambda r: cache.match_prefix(r, [1]),
        lambda r: cache.commit(r, [1]),
    ):
        for row in (1, -1):
            with pytest.raises(ValueError, match=f"row {row} does not exist; rows run from 0 to 0"):
                operation(row)
    with pytest.raises(ValueError, match="row 0 has 6 tokens already: a prefix is matched into an empty row"):
        cache.match_prefix(0, [1, 2])
    with pytest.raises(ValueError, match="row 0 has 6 tokens, only 5 ids are given: name them all"):
        cache.commit(0, text[:5])
    assert_logits(call(MODEL, cache, [[1]], [6])[0], own([*text, 1])[6:])


def test_a_pool_serves_one_model_and_dtype():
    pool = BlockPool(8, 4)
    feed(MODEL, PagedCache(1, pool=pool), [[1, 2]], [[2]])
    late = PagedCache(1, pool=pool)
    with pytest.raises(ValueError, match="keys are torch.float32 on cpu, the pool holds torch.float64 on cpu"):
        call(toy(seed=5, dtype=torch.float32), late, [[1, 2]], [0])
    with pytest.raises(ValueError, match="keys have 1 heads of 8, the pool holds 2 of 8: a pool serves one model"):
        call(toy(num_key_value_heads=1), late, [[1, 2]], [0])
    assert pool.used_blocks == 1 or late.lengths == [0]
    assert_logits(call(MODEL, late, [[1, 2]], [0])[0], own([1, 2]))


def test_chunks_of_a_ragged_batch_over_a_tight_pool():
    texts = ids_for(16, [13, 5, 8])
    cache = paged(3, block_size=4, num_blocks=4 + 2 + 2)
    for b, got in enumerate(feed(MODEL, cache, texts, in_chunks([13, 5, 8], 3))):
        assert_logits(got, dense_logits(MODEL, texts[b]))
    assert not cache.pool.free
