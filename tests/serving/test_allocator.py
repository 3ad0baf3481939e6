"""The paged allocator: admission by free blocks, growth, sharing, and what it says about memory."""

import pytest
from books import check_books

from kvlab.caches import BlockPool
from kvlab.serving import Allocator, PagedAllocator, Request, Scheduler
from kvlab.serving.allocator import gaps


def allocator(blocks=6, block_size=4, **options) -> PagedAllocator:
    a = PagedAllocator(BlockPool(blocks, block_size), **{"headroom": 0, **options})
    Scheduler(a)  # gives it a trace
    return a


def named(id, prompt, max_tokens=8) -> Request:
    return Request(prompt, max_tokens, id)


def kinds(a) -> list[tuple]:
    return [(e.kind, e.request, e.a) for e in a.trace.events]


def write(a, request, tokens):
    """As a scheduler and a forward pass would."""
    assert a.grow(request, tokens)
    request.num_computed_tokens = tokens
    a.wrote(request)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_every_length_takes_the_blocks_it_needs(block_size):
    for n in range(1, 3 * block_size + 2):
        a, r = allocator(12, block_size), named("r", [1] * n)
        assert a.admit(r) == 0
        for tokens in range(1, n + 1):
            write(a, r, tokens)
            assert a.slots_held(r) == a.slots_used == -(-tokens // block_size) * block_size
            assert sum(slots for _, slots in a.pieces(r)) == a.slots_held(r)
        a.release(r)
        assert a.slots_used == 0 and a.slots_free == a.num_slots == 12 * block_size
        a.pool.check([])


def test_growth_is_all_or_nothing():
    a, r, other = allocator(3), named("r", [1]), named("o", [2])
    write(a, r, 4)
    write(a, other, 4)
    before = list(a.pool.free), list(a.rows[r].table), len(a.trace.events)
    assert not a.grow(r, 13)
    assert (list(a.pool.free), list(a.rows[r].table), len(a.trace.events)) == before
    assert a.grow(r, 8) and a.grow(r, 8) and a.grow(r, 1)  # what it has is enough
    assert a.slots_held(r) == 8


def test_admission_counts_what_is_found_and_what_it_takes_from_the_free_list():
    text = list(range(12))
    a = allocator(4, prefix_sharing=True)
    first = named("first", text)
    assert a.admit(first) == 0
    write(a, first, 12)
    same = named("same", text)
    assert a.admit(same) == 8  # two blocks are in use and shared; one more is needed and free
    assert a.slots_used == 12 and a.rows[same].table == a.rows[first].table[:2]
    a.release(same)
    a.release(first)
    assert a.slots_used == 0
    other = named("other", [9] * 9)
    assert a.admit(other) == 0
    write(a, other, 4)
    # two of the three free blocks hold the text: they count as found, and no longer as free
    assert a.admit(named("longer", [*text, *range(50, 54)])) is None
    again = named("again", text)
    assert a.admit(again) == 8 and a.pool.used_blocks == 3
    a.pool.check([row.table for row in a.rows.values()])


def test_headroom_counts_those_who_run():
    a = allocator(4, headroom=1)
    for id, answer in (("a", 0), ("b", 0), ("c", None)):  # c would leave one block for two
        r = named(id, [1] * 4)
        assert a.admit(r) == answer
        if answer == 0:
            a.grow(r, 4)
    assert a.slots_free == 8


def test_a_fork_copies_a_block_when_it_is_written_and_the_last_owner_keeps_it():
    a, parent, child = allocator(), named("p", [1] * 6), named("c", [1] * 6)
    write(a, parent, 6)
    a.fork(parent, child)
    assert a.pieces(child) == a.pieces(parent) and a.slots_used == 8 and a.slots_held(child) == 8
    child.num_computed_tokens = 6
    del a.trace.events[:]
    write(a, parent, 7)
    write(a, child, 7)
    assert kinds(a) == [("gives", "p", 4), ("takes", "p", 8), ("copied", "p", 4)]  # slots: blocks 1 and 2
    assert a.slots_used == 12 and a.pieces(child) == [(0, 4), (4, 4)] and a.pieces(parent) == [(0, 4), (8, 4)]
    a.pool.check([row.table for row in a.rows.values()])


def test_a_step_that_failed_gives_its_blocks_back():
    a, r = allocator(), named("r", [1] * 9)
    write(a, r, 4)
    assert a.grow(r, 9) and a.slots_held(r) == 12
    a.trim(r)
    assert a.slots_held(r) == 4 and kinds(a)[-2:] == [("gives", "r", 4), ("gives", "r", 8)]
    a.trim(r)
    assert a.slots_held(r) == 4


def test_only_what_is_computed_is_shared():
    text = list(range(12))
    a = allocator(8, prefix_sharing=True)
    first = named("first", text)
    a.admit(first)
    assert a.grow(first, 12)  # planned, not computed
    assert a.pool.find([*text, 1])[0] == []
    first.num_computed_tokens = 7
    a.wrote(first)
    assert a.pool.find([*text, 1])[0] == a.rows[first].table[:1]
    alone = allocator(8, prefix_sharing=False)
    r = named("r", text)
    write(alone, r, 12)
    assert alone.pool.block_of == {} and alone.admit(named("s", text)) == 0


def test_free_runs_and_fragmentation():
    assert gaps([], 5) == [(0, 5)] and gaps([(0, 5)], 5) == []
    assert gaps([(3, 1), (0, 1)], 6) == [(1, 2), (4, 2)]
    a = Allocator(10)
    Scheduler(a)
    one, two = named("1", [1]), named("2", [1])
    a.take(one, 0, 2)
    a.take(one, 6, 1)
    a.take(two, 3, 2)
    assert a.free_runs() == [(2, 1), (5, 1), (7, 3)] and a.external_fragmentation == 1 - 3 / 5
    assert (a.slots_used, a.slots_free, a.slots_held(one), a.pieces(one)) == (5, 5, 3, [(0, 2), (6, 1)])
    a.give(one, 6, 1)
    assert a.free_runs() == [(2, 1), (5, 5)] and a.pieces(one) == [(0, 2)]
    a.release(one)
    a.release(one)  # holds nothing: nothing happens
    assert kinds(a)[-1] == ("releases", "1", None) and a.slots_used == 2
    full = Allocator(4)
    Scheduler(full)
    full.take(one, 0, 4)
    assert full.free_runs() == [] and full.external_fragmentation == 0
    p = allocator(4)
    write(p, one, 4)
    write(p, two, 4)
    p.release(one)
    assert p.free_runs() == [(0, 4), (8, 8)] and p.external_fragmentation == 0


def test_the_pool_is_found_again_by_the_next_scheduler():
    """A pool outlives its scheduler: a later one finds the prefixes that are left in it."""
    pool, text = BlockPool(8, 4), list(range(10))
    for found in (0, 8):
        s = Scheduler(PagedAllocator(pool))
        r = s.add(named("r", text, 2))
        while s.unfinished:
            for request, _ in s.schedule():
                for ready in s.computed(request):
                    s.append(ready, 1)
            s.end_step()
            check_books(s)
        assert r.num_cached_tokens == found
