"""Folded and decoded attention over a quantized cache are the same, to rounding, and neither changes the cache."""

import pytest
import torch
from oracles import ids_for, rounded, toy

import kvlab.model
from kvlab.attention import View, attend
from kvlab.caches import QuantizedCache, make_cache
from kvlab.caches.folding import attend_codes

BITS = [8, 4, 2, "fp8", "fp8_e5m2", 16]


def filled(n, B=1, dtype=torch.float64, n_kv=2, D=16, Dv=16, seed=0, one_by_one=True, **options):
    """(cache of one layer after n tokens, the keys, the values, all (B, n_kv, n, D)); the last token came alone."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(B, n_kv, n, D, generator=rng, dtype=torch.float64)
    k[..., 3] *= 20  # an outlier channel
    v = torch.randn(B, n_kv, n, Dv, generator=rng, dtype=torch.float64)
    k, v = k.to(dtype), v.to(dtype)
    options = {"group_size": 8, "residual_length": 0, **options}
    cache = QuantizedCache(B, max_length=64, **options)
    done = 0
    while done < n:
        T = min(cache.max_chunk(n - 1 - done), n - 1 - done) if done < n - 1 else 1
        pos = torch.arange(done, done + T).expand(B, T)
        view = cache.append(0, k[:, :, done : done + T], v[:, :, done : done + T], pos)
        cache.advance(pos)
        done += T
    return cache, k, v, view


def query(B=1, H=6, D=16, dtype=torch.float64):
    return torch.randn(B, H, 1, D, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("R", [0, 5])
@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [3, 8, 9, 33, 45])
@pytest.mark.parametrize("tile", [None, 8, 16])
def test_folded_equals_decoded_equals_the_view(bits, key_axis, R, n, tile):
    cache, _, _, view = filled(n, B=2, k_bits=bits, v_bits=bits, key_axis=key_axis, residual_length=R)
    q = query(B=2)
    want = attend(q, view)
    for fold in (True, False):
        got = attend_codes(q, cache, 0, fold=fold, tile=tile)
        assert got.shape == want.shape == (2, 6, 1, 16)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12 * want.abs().max().item())


@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("k_bits, v_bits, group", [(8, 8, 8), (4, 2, 4), (2, 4, 16), (4, 8, 64)])
def test_folded_equals_numbers_rounded_by_hand(k_bits, v_bits, group, key_axis):
    """The oracle rounds with numpy, group by group, and shares no code with the cache."""
    n, G = 50 if group == 64 else 41, group
    cache, k, v, _ = filled(n, k_bits=k_bits, v_bits=v_bits, group_size=G, key_axis=key_axis)
    S = (n - 1) // G * G
    assert cache.sealed[0] == [S]
    heads = lambda x, bits, axis: rounded(x[0].transpose(0, 1), bits, axis, G).transpose(0, 1)[None]  # noqa: E731
    keys = torch.cat((heads(k[:, :, :S], k_bits, key_axis), k[:, :, S:]), 2) if S else k
    values = torch.cat((heads(v[:, :, :S], v_bits, "token"), v[:, :, S:]), 2) if S else v
    q = query()
    scores = torch.einsum("bgmd,bgsd->bgms", q.view(1, 2, 3, 16), keys) / 4
    want = torch.einsum("bgms,bgsd->bgmd", scores.softmax(-1), values).reshape(1, 6, 1, 16)
    torch.testing.assert_close(attend_codes(q, cache, 0), want, rtol=0, atol=1e-12 * want.abs().max().item())


def test_in_a_model_every_layer_gives_what_it_gave(monkeypatch):
    """The queries of a real step, caught where the model attends; rotary positions, GQA and two layers included."""
    model, text = toy(seed=3), torch.tensor(ids_for(1, [30]))
    cache, caught = make_cache("quantized", model, 1, 32, k_bits=4, v_bits=4, group_size=4, residual_length=4), []

    def spying(q, view, mask=None, **options):
        y = attend(q, view, mask, **options)
        caught.append((q, y))
        return y

    with torch.no_grad():
        model(text[:, :29], cache)
        monkeypatch.setattr(kvlab.model, "attend", spying)
        model(text[:, 29:], cache)
    assert len(caught) == 2 and cache.sealed[0] == [24]
    for layer, (q, y) in enumerate(caught):
        torch.testing.assert_close(attend_codes(q, cache, layer), y, rtol=0, atol=1e-12 * y.abs().max().item())


def test_a_wrong_scale_would_be_seen():
    """The oracle bites: one group's scale off by a part in a thousand is far above the tolerance."""
    cache, _, _, view = filled(33, k_bits=4, v_bits=4)
    want = attend(query(), view)
    for which in (0, 1):
        for part in (1, 2):  # scale, zero point
            touched = cache.fork()
            touched.codes[0][which][part][:, :, 1] *= 1.01
            assert (attend_codes(query(), touched, 0) - want).abs().max() > 1e-6


def test_nothing_is_changed_and_the_scale_is_the_readers():
    cache, *_, view = filled(20)
    before = cache.nbytes, cache.bytes_read, cache.bytes_copied, [x.clone() for x in cache.codes[0][0]]
    got = attend_codes(query(), cache, 0, scale=0.5)
    view.scale = 0.5
    torch.testing.assert_close(got, attend(query(), view), rtol=0, atol=1e-12)
    assert (cache.nbytes, cache.bytes_read, cache.bytes_copied) == before[:3]
    assert all(torch.equal(a, b) for a, b in zip(before[3], cache.codes[0][0]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_in_other_types_the_error_is_that_types(dtype, tolerance):
    cache, _, _, view = filled(40, dtype=dtype, k_bits=4, v_bits=4)
    q = query(dtype=dtype)
    exact = attend(q.double(), View(view.k.double(), view.v.double(), view.pos))
    got = attend_codes(q, cache, 0)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() < tolerance * 20  # scores reach 20 with this outlier channel


def test_values_may_be_wider_than_keys():
    cache, _, _, view = filled(20, Dv=8)
    got = attend_codes(query(), cache, 0)
    assert got.shape == (1, 6, 1, 8)
    torch.testing.assert_close(got, attend(query(), view), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"q": torch.zeros(1, 6, 2, 16)}, ValueError, "one query a head"),
        ({"q": torch.zeros(1, 5, 1, 16)}, ValueError, "a multiple of 2"),
        ({"q": torch.zeros(2, 6, 1, 16)}, ValueError, r"q has shape \(2, 6, 1, 16\)"),
        ({"layer": 3}, ValueError, r"layer 3 holds nothing yet; the cache has layers \[0\]"),
        ({"tile": 12}, ValueError, "tile=12 splits groups: it must be a multiple of group_size=8"),
        ({"tile": 0}, ValueError, "tile=0 must be at least 1"),
        ({"tile": 8.0}, TypeError, "tile=8.0 must be an int"),
        ({"cache": make_cache("full", toy())}, TypeError, "cache is a FullCache; only a QuantizedCache has codes"),
    ],
)
def test_bad_input_is_named(change, error, words):
    cache, *_ = filled(20)
    given = {"q": query(), "cache": cache, "layer": 0, **change}
    with pytest.raises(error, match=words):
        attend_codes(given.pop("q"), given.pop("cache"), given.pop("layer"), **given)


def test_rows_of_different_lengths_are_refused():
    cache, *_ = filled(20, B=2)
    cache.rewind([1, 0])
    with pytest.raises(ValueError, match=r"the rows hold \[19, 20\] tokens"):
        attend_codes(query(B=2), cache, 0)
