"""The exercises of notebook 07: answers against the caches themselves, and the sentence that each mistake gets."""

import pytest
import torch

import kvlab
from kvlab.caches.paged import PagedCache
from kvlab.caches.pool import BlockPool
from kvlab.exercise_paged import blocks_needed, matched, slot_of


def test_a_paged_cache_puts_the_token_there():
    pool = BlockPool(12, 16)
    pool.free = type(pool.free).fromkeys([7, 3, 11, 4, 0, 1, 2, 5, 6, 8, 9, 10])  # taken in this order
    cache = PagedCache(1, pool=pool)
    k = torch.arange(60, dtype=torch.float64).view(1, 1, 60, 1)
    pos = torch.arange(60)[None]
    cache.append(0, k, k, pos)
    assert cache.rows[0].table == [7, 3, 11, 4]
    held = pool.k[0].view(-1)
    assert [held[slot_of((7, 3, 11, 4), 16, p)].item() for p in range(60)] == list(range(60))
    assert slot_of((7, 3, 11, 4), 16, 37) == 181


@pytest.mark.parametrize("tokens, new, size", [(15, 1, 16), (16, 1, 16), (0, 33, 16), (7, 9, 1)])
def test_the_blocks_are_those_that_the_pool_gives(tokens, new, size):
    pool = BlockPool(50, size)
    cache = PagedCache(1, pool=pool)
    ones = torch.ones(1, 1, tokens + new, 1)
    pos = torch.arange(tokens + new)[None]
    if tokens:
        cache.append(0, ones[:, :, :tokens], ones[:, :, :tokens], pos[:, :tokens])
        cache.advance(pos[:, :tokens])
    before = pool.used_blocks
    cache.append(0, ones[:, :, tokens:], ones[:, :, tokens:], pos[:, tokens:])
    assert blocks_needed(tokens, new, size) == (pool.used_blocks - before,)


def test_what_is_matched_is_what_the_prompt_need_not_compute():
    assert [matched(*case)[0] for case in ((40, 35, 16), (32, 32, 16), (33, 32, 16), (7, 7, 1))] == [32, 16, 32, 6]


@pytest.mark.parametrize(
    "given, words",
    [(37, "position in the text"), (176, "first slot of the right block"), (3 * 16 + 5, "entry 1"), (69, "entry 3"),
     (7 * 16 + 37, "neighbours"), (11, "that is the block"), (16, "16 slots"), (200, "too large")],
)  # fmt: skip
def test_the_slot(given, words):
    verdict = kvlab.check_answer("07.1", given)
    assert not verdict.ok and words in repr(verdict), verdict


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda t, n, b: int((t + n) % b == 0), "just become full"),
        (lambda t, n, b: (t + n) // b - t // b, "become full; taken are"),
        (lambda t, n, b: -(-n // b), "room left"),
        (lambda t, n, b: -(-(t + n) // b), "all of its blocks"),
        (lambda t, n, b: (t + n) / b, "counted were"),
        (lambda t, n, b: ..., "returns no number yet"),
        (lambda t: t, "raised TypeError"),
        (2, "the function"),
    ],
)
def test_the_blocks_of_a_step(wrong, words):
    verdict = kvlab.check_answer("07.2", wrong)
    assert not verdict.ok and words in repr(verdict), verdict


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda p, c, b: c // b * b, "nothing to compute"),
        (lambda p, c, b: min(c, p - 1), "only full blocks"),
        (lambda p, c, b: c, "only full blocks are shared, and one"),
        (lambda p, c, b: min(c // b * b, p - 1), "whole or not at all"),
        (lambda p, c, b: min(c, p - 1) // b, "about tokens"),
        (lambda p, c, b: (c - 1) // b * b, "of the *prompt*"),
        (lambda p, c, b: 0, "counted were 32"),
        (lambda p, c, b: None, "returns no number yet"),
    ],
)
def test_the_prefix(wrong, words):
    verdict = kvlab.check_answer("07.3", wrong)
    assert not verdict.ok and words.lower() in repr(verdict).lower(), verdict
