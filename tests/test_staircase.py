"""The closed forms of the staircase against the real caches, event by event."""

import pytest
import torch

from kvlab import ModelConfig, make_cache
from kvlab.exercise_list import llama_7b
from kvlab.measure import live_tensors_bytes, memory
from kvlab.staircase import KINDS, changes, heights, running

SMALL = ModelConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)


class Shape:
    """What make_cache needs of a model."""

    config, rope_freq = SMALL, torch.ones(4)


def drive(kind, prompt, new, batch, **options):
    """A cache fed by hand, the inputs of its decode steps made before -> Memory, the cache, bytes after each step."""
    cache = make_cache(kind, Shape, batch, prompt + new, **options)

    def made(T):
        return [torch.zeros(batch, SMALL.num_key_value_heads, T, SMALL.head_dim) for _ in range(2)]

    steps = [[made(1) for _ in range(SMALL.num_hidden_layers)] for _ in range(new)]
    positions = [torch.full((batch, T), n) for n, T in [(0, 1)] * (prompt == 1) + [(prompt + i, 1) for i in range(new)]]
    first = torch.arange(prompt).expand(batch, prompt).contiguous()
    positions = [first, *positions[-new:]] if new else [first]
    after, used = [], []
    with memory() as m:
        for step, pos in enumerate(positions):
            for layer in range(SMALL.num_hidden_layers):
                k, v = made(prompt) if step == 0 else steps[step - 1][layer]
                cache.append(layer, k, v, pos)
                del k, v
            cache.advance(pos)
            after.append(live_tensors_bytes(cache))
            used.append(cache.nbytes_in_use)
    return m, cache, after, used


@pytest.mark.parametrize("prompt, new, batch", [(1, 3, 1), (5, 4, 2), (16, 2, 3)])
def test_growing_is_told_event_by_event(prompt, new, batch):
    m, *_ = drive("growing", prompt, new, batch)
    events = list(changes("growing", SMALL, prompt, new, batch, itemsize=4))
    told = running(events)
    assert max(told) == m.peak
    real = [e.live for e in m.timeline]
    decode = [e for e in events if e.tokens > prompt]
    assert told[len(events) - len(decode) :] == real[-len(decode) :]  # every single step of the ladder


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_what_is_allocated_once_stays(kind):
    options = {"window": 6} if kind == "sliding" else {}
    _, cache, *_ = drive(kind, 4, 9, 2, **options)
    events = list(changes(kind, SMALL, 4, 9, 2, itemsize=4, window=6))
    assert running(events)[-1] == cache.nbytes and {e.tokens for e in events} == {4}


def test_blocks_in_use_are_the_steps():
    _, _, _, used = drive("paged", 5, 30, 2, block_size=8)
    rows = heights("paged", SMALL, range(5, 36), 35, 2, 4, block_size=8)
    assert [r.held for r in rows] == used
    events, live, by = list(changes("paged", SMALL, 5, 30, 2, 4, block_size=8)), 0, {}
    for e in events:
        live += e.nbytes
        by[e.tokens] = live
    assert all(used[n - 5] == b for n, b in by.items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 4])
def test_heights_are_what_walking_there_gives(kind, batch):
    prompt, new = 3, 40
    events = list(changes(kind, SMALL, prompt, new, batch, 2, 16, 8))
    live = 0
    by = {}
    for e in events:
        live += e.nbytes
        held, top = by.get(e.tokens, (0, 0))
        by[e.tokens] = live, max(top, live)
    at = sorted(by)
    rows = heights(kind, SMALL, at, prompt + new, batch, 2, 16, 8)
    assert [r.held for r in rows] == [by[n][0] for n in at]
    assert [r.peak for r in rows[1:]] == [by[n][1] for n in at[1:]]  # the first step copies nothing


def test_llama_7b_for_a_moment():
    (row,) = heights("growing", llama_7b(), [4097], 4097)
    assert row.held - 8 * 4097 == 4097 * 512 * 1024
    assert row.peak - row.held - 8 * 4096 == 4096 * 16 * 1024  # one layer twice


@pytest.mark.parametrize(
    "args, words", [(("quantized", SMALL, 1, 1), "no staircase"), (("full", SMALL, 0, 1), "prompt")]
)
def test_bad_input(args, words):
    with pytest.raises(ValueError, match=words):
        list(changes(*args))
