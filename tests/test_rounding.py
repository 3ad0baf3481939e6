"""What notebook 05 measures: rounding errors, bytes, and the work of attention over codes."""

import pytest
import torch
from oracles import ids_for, toy

from kvlab import rounding
from kvlab.attention import attend
from kvlab.caches import QuantizedCache, make_cache
from kvlab.caches.folding import attend_codes
from kvlab.memory import estimate


def text(n, seed=1):
    return torch.tensor(ids_for(seed, [n]))


def test_keys_and_values_are_those_of_a_cache():
    model = toy()
    k, v = rounding.keys_values(model, text(20))
    cache = make_cache("growing", model, 1, 32)
    with torch.no_grad():
        model(text(20), cache)
    assert k.shape == v.shape == (2, 2, 20, 8)
    assert torch.equal(k[1], cache.k[1][0]) and torch.equal(v[0], cache.v[0][0])


def test_an_outlier_channel_is_seen_and_costs_per_token_rounding_most():
    k = torch.randn(3, 2, 130, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k[1, 0, :, 5] *= 30
    found = rounding.outliers(k)
    assert found.shape == (3, 2, 16) and found[1, 0].argmax() == 5 and found[1, 0, 5] > 20 and found[0].max() < 2
    per = {a: rounding.relative_error(k[1, 0, :, [0, 1, 5]].repeat(1, 2)[None], 4, a) for a in ("token", "channel")}
    assert rounding.rounded(k, 4, "channel").shape == (3, 2, 128, 16)
    assert rounding.rounded(k, 4, "token").shape == k.shape
    small = {a: (rounding.rounded(k, 4, a)[1, 0, :128, 0] - k[1, 0, :128, 0]).square().mean() for a in per}
    assert small["token"] > 20 * small["channel"]


def test_too_few_tokens_for_a_group_are_named():
    with pytest.raises(ValueError, match="40 tokens make no whole group of 64"):
        rounding.rounded(torch.ones(2, 40, 8), 4, "channel")
    assert rounding.rounded(torch.ones(2, 40, 8), 4, "token").shape == (2, 40, 8)


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8", 16])
def test_relative_error_is_what_it_says(bits):
    x = torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = rounding.rounded(x, bits, "channel")
    want = ((x - y) ** 2).sum().sqrt() / (x**2).sum().sqrt()
    assert rounding.relative_error(x, bits, "channel") == pytest.approx(want.item(), abs=1e-12)
    assert (rounding.relative_error(x, bits, "channel") == 0) == (bits == 16)


def test_errors_of_layers_begin_where_rounding_begins():
    model = toy(num_hidden_layers=3, dtype=torch.float64)
    options = {"group_size": 4, "residual_length": 0}
    caches = {
        "exact": ("quantized", {"k_bits": 16, "v_bits": 16, **options}),
        "int8": ("quantized", {"k_bits": 8, "v_bits": 8, **options}),
        "int2": ("quantized", {"k_bits": 2, "v_bits": 2, **options}),
    }
    found = rounding.error_by_layer(model, text(24), caches, chunk=8)
    assert all(e.shape == (3, 24) for e in found.values())
    assert found["exact"].max() < 1e-12
    for name in ("int8", "int2"):
        assert found[name][:, :4].max() < 1e-12 and found[name][:, 8:].min() > 1e-6, name
    assert found["int2"][:, 8:].mean() > 5 * found["int8"][:, 8:].mean()
    assert all(not block._forward_hooks for block in model.layers)


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8", "fp8_e5m2", 16])
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("group, residual, tokens", [(8, 0, 40), (4, 6, 21), (16, 64, 30), (64, 0, 150)])
def test_held_is_what_a_real_cache_holds(bits, axis, group, residual, tokens):
    model = toy(dtype=torch.float32)
    cache = make_cache("quantized", model, 1, tokens, k_bits=bits, v_bits=bits, key_axis=axis, group_size=group,
                       residual_length=residual)  # fmt: skip
    with torch.no_grad():
        model(text(3), cache)
    by = cache.nbytes_by()
    got = rounding.held(model.config, tokens, bits, axis, group, residual, itemsize=4)
    assert got == {"codes": by["keys"] + by["values"], "scales": by["scales"], "tail": by["tail"]}
    half = rounding.held(model.config, tokens, bits, axis, group, residual)
    options = {"k_bits": bits, "v_bits": bits, "key_axis": axis, "group_size": group, "residual_length": residual}
    assert sum(half.values()) == estimate(model.config, 1, tokens, "fp16", cache="quantized", **options).held_bytes


def test_work_counts_products_numbers_and_bytes():
    a, b = torch.ones(4, 8), torch.ones(8, 16)

    def call():
        c = a @ b  # 2*4*8*16 FLOPs, 256 bytes
        d = c * 2 + 1  # 64 + 64; two more tensors
        return torch.addcmul(d, c, c)  # 128

    w = rounding.work(call)
    assert w.products == 2 * 4 * 8 * 16 and w.elementwise == 4 * 64
    assert w.written == 4 * 256 and 3 * 256 <= w.peak <= 4 * 256


@pytest.mark.parametrize("S", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("R", [0, 8])
def test_one_layer_cache_is_the_cache_of_a_text(S, R):
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, S, 8, generator=rng) for _ in "kv")
    options = {"k_bits": 4, "v_bits": 2, "group_size": 8, "residual_length": R}
    cache, single = rounding.one_layer_cache(k, v, **options), QuantizedCache(2, S, **options)
    for t in range(S):
        pos = torch.full((2, 1), t)
        single.append(0, k[:, :, t : t + 1], v[:, :, t : t + 1], pos)
        single.advance(pos)
    assert cache.lengths == single.lengths == [S, S] and cache.sealed == single.sealed
    for mine, other in zip(cache.codes[0], single.codes[0]):
        assert all(torch.equal(a, b) for a, b in zip(mine, other))


def quantized(S, n_kv, D, bits=4, group=16):
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, n_kv, S, D, generator=rng, dtype=torch.float64) for _ in "kv")
    return rounding.one_layer_cache(k, v, k_bits=bits, v_bits=bits, group_size=group, residual_length=0)


@pytest.mark.parametrize("M", [1, 3])
def test_folding_saves_the_multiplications_in_closed_form(M):
    """One head, per-channel keys, values in one group a head: decoding costs 2 S D twice, folding 1 / group of it."""
    n_kv, D, G, S = 2, 16, 16, 64 + 1
    cache, q = quantized(S, n_kv, D, group=G), torch.ones(1, n_kv * M, 1, D, dtype=torch.float64)
    old = cache.sealed[0][0]
    assert old == 64
    decoded, folded = (rounding.work(lambda f=f: attend_codes(q, cache, 0, fold=f)) for f in (False, True))
    shared = n_kv * M * D * 2  # q * 1/sqrt(D), and adding what the tail gave
    assert decoded.elementwise == n_kv * 2 * 2 * old * D + shared
    assert folded.elementwise == n_kv * M * (old // G * D + old + old + D) + shared
    attention = 2 * 2 * n_kv * M * S * D
    assert decoded.products == attention
    assert folded.products == attention + 2 * n_kv * M * (old // G * D + old)  # the two biases
    assert folded.elementwise < decoded.elementwise / 4 and folded.written < decoded.written


def test_a_tile_bounds_the_temporary_for_both_ways():
    cache, q = quantized(257, 2, 16, group=16), torch.ones(1, 2, 1, 16, dtype=torch.float64)
    for fold in (False, True):
        whole, tiled = (
            rounding.work(lambda f=fold, t=t: attend_codes(q, cache, 0, fold=f, tile=t)) for t in (None, 16)
        )
        assert tiled.peak < whole.peak / 3
        assert whole.peak > 2 * 256 * 16 * 8  # keys of both heads as floats, at least
    view = make_cache("full", toy(), 1, 4).append(0, *[torch.ones(1, 2, 4, 8).double()] * 2, torch.arange(4)[None])
    assert rounding.work(lambda: attend(torch.ones(1, 2, 1, 8).double(), view)).elementwise == 0
