"""An exception in any layer leaves the cache as it was before the call, or unusable, and then it says so."""

import contextlib

import numpy as np
import pytest
import torch
from cases import SETUPS, name_of
from eviction_oracle import EVICTING
from oracles import assert_logits, call, dense_logits, feed, ids_for, rule_of, toy

from kvlab.attention import View
from kvlab.caches import KVCache, adopt, make_cache

MODEL = toy(seed=4)
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)


@contextlib.contextmanager
def failing(layer: int, after_append: bool, error: BaseException, at_call: int = 1):
    """Layer `layer` raises, before or behind the line that appends to the cache, when it is reached the nth time."""
    block, count = MODEL.layers[layer], 0
    module = block.mlp if after_append else block.self_attn
    forward = module.forward

    def raising(*args):
        nonlocal count
        count += 1
        if count == at_call:
            raise error
        return forward(*args)

    module.forward = raising
    try:
        yield
    finally:
        del module.forward


def books(cache):
    found = [cache.lengths, cache.nbytes_in_use]
    if hasattr(cache, "pool"):
        found += [list(cache.pool.ref), sorted(cache.pool.free), [list(r.table) for r in cache.rows]]
    elif any(cache.lengths):  # an empty one allocates at its first append
        found.append(cache.nbytes_by())
    return found


@every_setup
@pytest.mark.parametrize("held", [0, 3, 6, 11])
@pytest.mark.parametrize("T", [1, 3])
def test_as_before_the_call(setup, held, T):
    kind, options = setup
    rows, lost, new = ids_for(held, [held, max(0, held - 2)]), ids_for(20, [T, T]), ids_for(21, [2, 2])
    schedule = [[held, max(0, held - 2)]] if held else []
    control = make_cache(kind, MODEL, 2, 30, **options)
    feed(MODEL, control, rows, schedule)
    start = list(control.lengths)
    for error in (RuntimeError("out of memory"), KeyboardInterrupt()):
        for layer, after_append in ((0, False), (0, True), (1, False), (1, True)):
            cache = make_cache(kind, MODEL, 2, 30, **options)
            feed(MODEL, cache, rows, schedule)
            before = books(cache)
            with failing(layer, after_append, error), pytest.raises(type(error)):
                call(MODEL, cache, lost, start)
            assert books(cache) == before
            # forgetting still works as far as it did, and what follows is the same to the bit
            by = [control._largest_rewind(b) and 1 for b in range(2)]
            twin, other = control.fork(), cache.fork()
            for one in (twin, other):
                one.rewind(by)
            after = [n - x for n, x in zip(start, by)]
            for a, b in zip(call(MODEL, twin, new, after), call(MODEL, other, new, after)):
                assert torch.equal(a, b)
            if hasattr(cache, "pool"):
                for one in (twin, other):
                    while one.rows:
                        one.free_row(0)
                assert books(cache)[1:3] == before[1:3]
            # and the call that failed can be made again
            again = call(MODEL, cache, lost, start)
            for b in range(2):
                want = dense_logits(MODEL, rows[b] + lost[b], rule_of(kind, options))[start[b] :]
                assert_logits(again[b], want, what=f"row {b}")


@every_setup
@pytest.mark.parametrize("module", [MODEL.norm, MODEL.lm_head], ids=["norm", "lm_head"])
def test_behind_the_last_layer(setup, module):
    """The logits are often the largest tensor of a call: the one that memory runs out for."""
    kind, options = setup
    cache, text = make_cache(kind, MODEL, 1, 30, **options), ids_for(24, [4])[0]
    feed(MODEL, cache, [text[:2]], [[2]])
    before = books(cache)

    def raising(x):
        raise MemoryError("out of memory")

    module.forward = raising
    try:
        with pytest.raises(MemoryError):
            call(MODEL, cache, [text[2:3]], [2])
    finally:
        del module.forward
    assert books(cache) == before
    got = torch.cat([call(MODEL, cache, [[token]], [2 + i])[0] for i, token in enumerate(text[2:])])
    assert_logits(got, dense_logits(MODEL, text, rule_of(kind, options))[2:])


@every_setup
def test_in_a_later_chunk_of_the_call(setup):
    """Where the model has to split a call, its first chunks are stored; then the cache must refuse to go on."""
    kind, options = setup
    text = ids_for(22, [12])[0]
    cache = make_cache(kind, MODEL, 1, 30, **options)
    splits = cache.max_chunk(12) < 12
    with failing(1, True, RuntimeError("out of memory"), at_call=2):
        if not splits:  # one pass over the layers: the second call never comes
            call(MODEL, cache, [text], [0])
            return
        with pytest.raises(RuntimeError, match="out of memory"):
            call(MODEL, cache, [text], [0])
    assert kind in ("quantized", *EVICTING) or options.get("sinks_at") == "cache"
    with pytest.raises(RuntimeError, match="this cache is unusable: a call failed .* make a new one"):
        call(MODEL, cache, [text], [cache.lengths[0]])
    with pytest.raises(RuntimeError, match="unusable"):
        cache.append(0, *torch.zeros(2, 1, 2, 1, 8, dtype=torch.float64), torch.tensor([[cache.lengths[0]]]))


@every_setup
def test_many_failures_in_a_row(setup):
    """Every second call fails somewhere; the text must come out as if none had."""
    kind, options = setup
    rng, text = np.random.default_rng(0), ids_for(23, [24])[0]
    cache, out = make_cache(kind, MODEL, 1, 30, **options), []
    for p, token in enumerate(text):
        with failing(int(rng.integers(2)), bool(rng.integers(2)), RuntimeError("no")), pytest.raises(RuntimeError):
            call(MODEL, cache, [[7] * (1 if p else 2)], [p])
        out += call(MODEL, cache, [[token]], [p])
    assert_logits(torch.cat(out), dense_logits(MODEL, text, rule_of(kind, options)))


class Mine(KVCache):
    """A reader's cache: append alone."""

    def __init__(self, batch_size=1):
        super().__init__(batch_size)
        self.held = {}

    def append(self, layer, k, v, pos):
        if layer in self.held:
            k, v, pos = (
                torch.cat(both, -2 if both[0].dim() == 4 else 1) for both in zip(self.held[layer], (k, v, pos))
            )
        self.held[layer] = k, v, pos
        return View(k, v, pos)


class NoBase:
    def __init__(self):
        self.inner = Mine()

    def append(self, *args):
        return self.inner.append(*args)


@pytest.mark.parametrize("make", [Mine, lambda: adopt(NoBase())], ids=["derived", "adopted"])
def test_a_cache_that_cannot_undo_is_unusable_and_says_so(make):
    cache = make()
    text = ids_for(24, [6])[0]
    got = feed(MODEL, cache, [text[:4]], [[2], [2]])[0]
    assert_logits(got, dense_logits(MODEL, text[:4]))
    with failing(1, False, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        call(MODEL, cache, [text[4:]], [4])
    with pytest.raises(RuntimeError, match="unusable"):
        call(MODEL, cache, [text[4:]], [4])
