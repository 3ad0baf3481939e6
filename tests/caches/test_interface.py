"""Bad input to any cache: one sentence with the value and the way out, and nothing has changed."""

import pytest
import torch
from cases import SETUPS, name_of
from oracles import assert_logits, call, dense_logits, feed, ids_for, rule_of, toy

from kvlab.attention import View
from kvlab.caches import KINDS, CacheFull, KVCache, RewindError, adopt, make_cache
from kvlab.model import GPT

MODEL = toy(seed=8)
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=name_of)
ROWS = ids_for(0, [5, 3])


def fed(setup):
    cache = make_cache(setup[0], MODEL, 2, 12, **setup[1])
    feed(MODEL, cache, ROWS, [[5, 3]])
    return cache


def assert_unchanged(cache, setup):
    """Both rows go on exactly as if nothing had been tried."""
    assert cache.lengths == [5, 3]
    got = call(MODEL, cache, [[1, 2], [3]], [5, 3])
    for b, new in enumerate(([1, 2], [3])):
        want = dense_logits(MODEL, ROWS[b] + new, rule_of(*setup))[len(ROWS[b]) :]
        assert_logits(got[b], want, what=f"row {b}")


@every_setup
@pytest.mark.parametrize("held", [True, False], ids=["warm", "new"])
def test_append_refuses_what_does_not_fit(setup, held):
    cache = fed(setup) if held else make_cache(setup[0], MODEL, 2, 12, **setup[1])
    before = list(cache.lengths)
    assert_refused(cache, before, known=held)
    if held:
        assert_unchanged(cache, setup)
    else:
        assert cache.dtype is None and cache.nbytes_in_use == 0
        got = feed(MODEL, cache, ROWS, [[5, 3]])
        assert_logits(got[0], dense_logits(MODEL, ROWS[0], rule_of(*setup)))


def assert_refused(cache, lengths, known):
    pos = torch.tensor([[n] for n in lengths])

    def kv(*shape, dtype=torch.float64):
        return torch.zeros(*shape, dtype=dtype)

    good = kv(2, 2, 1, 8)
    with pytest.raises(ValueError, match=r"keys \(2, 2, 8\), values \(2, 2, 1, 8\): must be \(B, n_kv, T, D\)"):
        cache.append(0, kv(2, 2, 8), good, pos)
    with pytest.raises(ValueError, match=r"must be \(B, n_kv, T, D\) and agree in all but D"):
        cache.append(0, good, kv(2, 1, 1, 8), pos)
    with pytest.raises(ValueError, match=r"pos \(2, 2\) must be \(B, T\) = \(2, 1\)"):
        cache.append(0, good, good, pos.repeat(1, 2))
    with pytest.raises(ValueError, match="3 rows of tokens for a cache of 2 rows: make it with batch_size=3"):
        cache.append(0, kv(3, 2, 1, 8), kv(3, 2, 1, 8), torch.zeros(3, 1, dtype=torch.int64))
    for wrong in (pos + 1, pos - 2):
        with pytest.raises(ValueError, match=rf"row 0 has {lengths[0]} tokens, so its next positions start at"):
            cache.append(0, good, good, wrong)
    if known:
        with pytest.raises(
            ValueError, match="keys are torch.float32, the cache holds torch.float64: a cache serves one"
        ):
            cache.append(0, good.float(), good, pos)
        with pytest.raises(ValueError, match="values are torch.float16, the cache holds torch.float64"):
            cache.append(0, good, good.half(), pos)
        with pytest.raises(ValueError, match="keys are on meta, the cache is on cpu: make a cache for that device"):
            cache.append(0, good.to("meta"), good, pos)
        with pytest.raises(
            ValueError, match="layer 0 has .* = .1, 8, 8., the cache holds .2, 8, 8.: a cache serves one"
        ):
            cache.append(0, kv(2, 1, 1, 8), kv(2, 1, 1, 8), pos)
        with pytest.raises(ValueError, match="a cache serves one model"):
            cache.append(1, kv(2, 2, 1, 4), good, pos)


@every_setup
def test_the_model_is_refused_too(setup):
    """The same through model(): another model's dtype or shape, and positions that are not the next."""
    cache = fed(setup)
    for other, message in (
        (toy(seed=8, dtype=torch.float32), "keys are torch.float32, the cache holds torch.float64"),
        (toy(num_key_value_heads=1), "a cache serves one model"),
    ):
        with pytest.raises(ValueError, match=message):
            call(other, cache, [[1], [1]], [5, 3])
    with pytest.raises(ValueError, match=r"row 1 has 3 tokens, so its next positions start at 3; got \[5\]"):
        call(MODEL, cache, [[1], [1]], [5, 5])
    with pytest.raises(ValueError, match=r"got \[4, 5, 6, 7\] \.\.\. \(use cache.next_positions\)"):
        call(MODEL, cache, [[1] * 6, [1]], [4, 3])
    with pytest.raises(ValueError, match="1 rows of tokens for a cache of 2 rows: make it with batch_size=1"):
        call(MODEL, cache, [[1]], [5])
    assert_unchanged(cache, setup)


@pytest.mark.parametrize("setup", [s for s in SETUPS if s[0] in ("full", "quantized")], ids=name_of)
def test_more_tokens_than_max_length(setup):
    cache = fed(setup)
    assert cache.bounded
    with pytest.raises(CacheFull, match="row 0 would have 13 tokens and .* max_length=12: make it with max_length=13"):
        call(MODEL, cache, [[1] * 8, [1]], [5, 3])
    assert_unchanged(cache, setup)
    got = call(MODEL, cache, [[1] * 5, []], [7, 4])[0]  # to the last slot
    assert_logits(got, dense_logits(MODEL, ROWS[0] + [1, 2] + [1] * 5, rule_of(*setup))[7:])
    with pytest.raises(CacheFull, match="row 0 would have 13"):
        call(MODEL, cache, [[1], []], [12, 4])
    assert isinstance(CacheFull("x"), ValueError) and isinstance(RewindError("x", 0), ValueError)


@pytest.mark.parametrize("setup", [s for s in SETUPS if s[0] in ("growing", "sliding")], ids=name_of)
def test_unbounded_caches_take_more_than_max_length(setup):
    cache = fed(setup)
    assert not cache.bounded
    for n in range(5, 40):
        call(MODEL, cache, [[1], []], [n, 3])
    assert cache.lengths == [40, 3]


@every_setup
def test_a_first_step_of_padding_alone(setup):
    """Nothing is held and nothing comes: an empty view must not fail, and the text that follows must not notice."""
    cache = make_cache(setup[0], MODEL, 2, 12, **setup[1])
    with torch.no_grad():
        assert MODEL(torch.tensor([[1], [2]]), cache, torch.tensor([[-1], [-1]])).isfinite().all()
    assert cache.lengths == [0, 0]
    for b, got in enumerate(feed(MODEL, cache, ROWS, [[5, 3]])):
        assert_logits(got, dense_logits(MODEL, ROWS[b], rule_of(*setup)))


def test_next_positions():
    cache = fed(("full", {}))
    assert cache.next_positions(2).tolist() == [[5, 6], [3, 4]]
    assert cache.next_positions([1, 3]).tolist() == [[-1, -1, 5], [3, 4, 5]]
    assert cache.next_positions([0, 1]).tolist() == [[-1], [3]]
    with pytest.raises(ValueError, match="lengths names 3 rows, the cache has 2"):
        cache.next_positions([1, 1, 1])
    with pytest.raises(ValueError, match=r"lengths=\[1, -1\] must be 0 or more new tokens"):
        cache.next_positions([1, -1])


@pytest.mark.parametrize("setup", SETUPS, ids=name_of)
def test_a_cache_serves_one_model_however_deep(setup):
    cache = fed(setup)
    n = MODEL.config.num_hidden_layers
    deeper = GPT(MODEL.config.with_(num_hidden_layers=n + 1, layer_types=None)).double()
    with pytest.raises(ValueError, match=f"layer {n} is one more than the {n} seen so far: a cache serves one model"):
        call(deeper, cache, [[1], [1]], [5, 3])
    assert_unchanged(cache, setup)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_length", [0, None, "8"], ids=str)
def test_max_length_is_checked_for_every_kind(kind, max_length):
    with pytest.raises((ValueError, TypeError), match="max_length=.* must be"):
        make_cache(kind, MODEL, 1, max_length)


@pytest.mark.parametrize(
    "kind,options,message",
    [
        ("quantized", {"k_bits": 8.0}, "8.0 bits are not known"),
        ("quantized", {"v_bits": [8]}, r"\[8\] bits are not known"),
        ("paged", {"pool": 3}, "pool is an int, not a BlockPool"),
        ([], {}, r"cache kind \[\] is not known"),
    ],
    ids=str,
)
def test_options_of_the_wrong_type(kind, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make_cache(kind, MODEL, 1, 8, **options)


# ---- making one


def test_make_cache_names_what_it_knows():
    later = ["heavy_hitter", "random", "first_last", "shared", "offloaded"]
    assert list(KINDS) == ["growing", "full", "sliding", "quantized", "paged", *later]
    with pytest.raises(
        ValueError, match="cache kind 'static' is not known; kinds are growing, full, sliding, quantized"
    ):
        make_cache("static", MODEL)
    with pytest.raises(ValueError, match="a sliding cache has no option 'size'; it has window, sinks, sinks_at"):
        make_cache("sliding", MODEL, size=3)
    with pytest.raises(ValueError, match="a full cache has no option 'window'; it has none"):
        make_cache("full", MODEL, window=3)
    with pytest.raises(ValueError, match="a paged cache has no option 'head_dim'"):
        make_cache("paged", MODEL, head_dim=3)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes(kind):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"batch_size={value} must be at least 1"):
            make_cache(kind, MODEL, value)
    with pytest.raises(TypeError, match="batch_size=1.5 must be an int"):
        make_cache(kind, MODEL, 1.5)
    with pytest.raises(TypeError, match="batch_size=True must be an int"):
        make_cache(kind, MODEL, True)
    if kind not in ("growing", "sliding"):
        with pytest.raises(ValueError, match="max_length=0 must be at least 1"):
            make_cache(kind, MODEL, 1, 0)
        with pytest.raises(TypeError, match="max_length='8' must be an int"):
            make_cache(kind, MODEL, 1, "8")


def test_sliding_options():
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        make_cache("sliding", MODEL, window=0)
    with pytest.raises(ValueError, match="sinks=-1 must be at least 0"):
        make_cache("sliding", MODEL, sinks=-1)
    with pytest.raises(TypeError, match="window=4.0 must be an int"):
        make_cache("sliding", MODEL, window=4.0)
    with pytest.raises(ValueError, match="sinks_at='start' must be 'text' .* or 'cache'"):
        make_cache("sliding", MODEL, window=4, sinks_at="start")
    with pytest.raises(ValueError, match="needs rope_freq: let make_cache hand it over"):
        KINDS["sliding"](window=4, sinks=1, sinks_at="cache")
    assert make_cache("sliding", toy(sliding_window=3)).window == 3  # the model's own, where it has one


# ---- caches of a reader's own


class Shortest(KVCache):
    def append(self, layer, k, v, pos):
        if layer in (held := vars(self).setdefault("held", {})):
            K, V, P = held[layer]
            k, v, pos = torch.cat((K, k), 2), torch.cat((V, v), 2), torch.cat((P, pos), 1)
        held[layer] = k, v, pos
        return View(k, v, pos)


class NotDerived:
    """append alone, and no base class."""

    def __init__(self):
        self.held, self.told = {}, []

    append = Shortest.append

    def advance(self, pos):
        self.told.append(pos.tolist())

    def rewind(self, n):
        self.held = {i: (k[:, :, :-n], v[:, :, :-n], p[:, :-n]) for i, (k, v, p) in self.held.items()}

    def fork(self):
        twin = NotDerived()
        twin.held = dict(self.held)
        return twin


@pytest.mark.parametrize("make", [lambda: Shortest(2), lambda: adopt(NotDerived(), 2)], ids=["derived", "adopted"])
def test_append_alone_makes_a_cache(make):
    got = feed(MODEL, make(), ROWS, [[2, 0], [1, 2], [2, 1]])
    for b, row in enumerate(ROWS):
        assert_logits(got[b], dense_logits(MODEL, row))


def test_an_adopted_cache_has_what_its_object_has():
    inner = NotDerived()
    cache = adopt(inner)
    text = ids_for(1, [6])[0]
    feed(MODEL, cache, [text], [[4], [2]])
    assert inner.told == [[[0, 1, 2, 3]], [[4, 5]]]
    twin = cache.fork()
    cache.rewind(2)
    assert cache.lengths == [4] and twin.lengths == [6]
    assert_logits(call(MODEL, cache, [[1]], [4])[0], dense_logits(MODEL, text[:4] + [1])[4:])
    assert_logits(call(MODEL, twin, [[1]], [6])[0], dense_logits(MODEL, text + [1])[6:])
    with pytest.raises(NotImplementedError, match="NotDerived does not offer reorder"):
        cache.reorder([0])
    assert adopt(cache) is cache
    with pytest.raises(TypeError, match=r"list has no append\(layer, k, v, pos\): it is not a cache|not a cache"):
        adopt(3)


def test_the_model_wants_a_kvcache():
    with pytest.raises(
        TypeError, match=r"cache is a NotDerived; derive it from KVCache, or wrap it: kvlab.caches.adopt"
    ):
        MODEL(torch.tensor([[1]]), NotDerived())
