"""The simulated allocator: PyTorch's documented rule on small cases, and books that balance on a long random walk."""

import random

import pytest

from kvlab.caching_allocator import MIB, CachingAllocator, replay, rounded, segment_for


@pytest.mark.parametrize("nbytes, size", [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512(nbytes, size):
    assert rounded(nbytes) == size


@pytest.mark.parametrize(
    "nbytes, segment",
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 1, 10 * MIB), (10 * MIB - 512, 20 * MIB),
     (10 * MIB, 10 * MIB), (10 * MIB + 1, 12 * MIB), (21 * MIB, 22 * MIB)],
)  # fmt: skip
def test_segments(nbytes, segment):
    assert segment_for(nbytes) == segment
    a = CachingAllocator()
    a.malloc(nbytes)
    assert (a.requested, a.reserved, a.segments_made) == (nbytes, segment, 1)


def test_small_requests_share_a_segment_and_a_freed_one_is_used_again():
    a = CachingAllocator()
    first, second = a.malloc(1000), a.malloc(1000)
    assert (a.allocated, a.reserved) == (2048, 2 * MIB)
    a.free(first)
    a.malloc(1024)
    assert (a.requested, a.allocated, a.reserved) == (2024, 2048, 2 * MIB)
    with pytest.raises(ValueError, match="freed already"):
        a.free(first)
    a.free(second)


def test_a_large_remainder_of_a_mebibyte_or_less_is_not_split_off():
    b = CachingAllocator()  # 11 MiB take a segment of 12
    b.malloc(11 * MIB)
    assert (b.requested, b.allocated, b.reserved) == (11 * MIB, 12 * MIB, 12 * MIB)


def test_the_smallest_free_piece_that_is_large_enough():
    a = CachingAllocator()
    big, _, small, _ = a.malloc(6 * MIB), a.malloc(2 * MIB), a.malloc(4 * MIB), a.malloc(3 * MIB)
    a.free(big), a.free(small)
    a.malloc(4 * MIB)  # into the 4, not the 6, so that 6 fit again
    a.malloc(6 * MIB)
    assert a.reserved == 20 * MIB


def test_freed_memory_stays_reserved_until_empty_cache():
    a = CachingAllocator()
    handles = [a.malloc(12 * MIB) for _ in range(3)]
    for h in handles:
        a.free(h)
    assert (a.allocated, a.reserved) == (0, 36 * MIB)
    keep = a.malloc(11 * MIB)
    assert a.empty_cache() == 24 * MIB and a.reserved == 12 * MIB
    a.free(keep)
    assert a.empty_cache() == 12 * MIB and a.reserved == 0


def test_a_tensor_in_a_segment_keeps_the_whole_segment():
    a = CachingAllocator()
    first, _ = a.malloc(2 * MIB), a.malloc(2 * MIB)
    a.free(first)
    assert a.empty_cache() == 0 and a.reserved == 20 * MIB


def test_the_books_balance_on_a_random_walk():
    rng, a, held = random.Random(0), CachingAllocator(), {}
    for _ in range(3000):
        if held and rng.random() < 0.5:
            h = rng.choice(list(held))
            a.free(h)
            del held[h]
        else:
            n = rng.choice([1, 700, 40_000, MIB, 3 * MIB, 9 * MIB, 15 * MIB]) + rng.randrange(5000)
            held[a.malloc(n)] = n
        assert a.requested == sum(held.values())
        assert a.requested <= a.allocated <= a.reserved <= a.peak_reserved
        assert a.reserved - a.allocated == sum(p.size for p in a._pieces.values())
    for h in held:
        a.free(h)
    assert a.allocated == 0 and a.empty_cache() > 0 and a.reserved == 0


def test_replay_names_each_step_once():
    rows = replay([(1, "a", 1000), (2, "b", 2000), (2, "a", -1000), (3, "b", -2000)])
    assert rows == [(1, 1000, 1024, 2 * MIB), (2, 2000, 2048, 2 * MIB), (3, 0, 0, 2 * MIB)]


def test_no_negative_or_empty_request():
    with pytest.raises(ValueError, match="at least 1 byte"):
        CachingAllocator().malloc(0)
