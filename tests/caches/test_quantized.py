"""When tokens are sealed, what is kept of them, and that the same codes come out whichever way the text came in."""

import pytest
import torch
from oracles import assert_logits, call, dense_logits, feed, ids_for, in_chunks, rule_of, toy

from kvlab.caches import make_cache
from kvlab.caches.codecs import make_codec

MODEL = toy(seed=6)
BITS = [8, 4, 2, "fp8", "fp8_e5m2"]


def quantized(B=1, max_length=48, model=MODEL, **options):
    return make_cache("quantized", model, B, max_length, **options)


def sealed_tokens(p: int, R: int, G: int) -> int:
    """Groups that are complete and none of whose tokens is among the R before position p."""
    return sum(1 for g in range(p) if (g + 1) * G + R <= p) * G


@pytest.mark.parametrize("R,G", [(0, 1), (0, 4), (3, 4), (8, 2), (5, 8), (64, 64)])
def test_sealed_at_counts_whole_groups_outside_the_residual(R, G):
    cache = quantized(group_size=G, residual_length=R)
    for p in range(0, 3 * (R + G) + 2):
        assert cache.sealed_at(p) == sealed_tokens(p, R, G)
        T = cache.max_chunk(1000) if p == 0 else None
        if T:
            assert T == R + G


@pytest.mark.parametrize("key_axis", ["channel", "token"])
@pytest.mark.parametrize("bits", BITS)
def test_streamed_codes_are_the_one_shot_codes_bit_for_bit(bits, key_axis):
    """Fed one by one, in chunks or at once, and beside a row of another length: the same bytes."""
    R, G, n = 3, 4, 21
    text, other = ids_for(1, [n, 9])
    rows = [text, other]
    stores = []
    for schedule in ([[n, 9]], in_chunks([n, 9], 1), in_chunks([n, 9], 5), in_chunks([n, 9], 8)):
        cache = quantized(2, k_bits=bits, v_bits=bits, key_axis=key_axis, group_size=G, residual_length=R)
        feed(MODEL, cache, rows, schedule)
        call(MODEL, cache, [[1], [1]], [n, 9])  # seals what is due
        stores.append(cache)
    sealed = sealed_tokens(n, R, G)
    assert sealed == 16 and all(c.sealed[layer] == [16, 4] for c in stores for layer in (0, 1))
    plain = make_cache("full", MODEL, 2, 48)
    feed(MODEL, plain, rows, [[n, 9]])
    for layer in (0, 1):
        for which, axis in ((0, key_axis), (1, "token")):
            first = [x[0] for x in stores[0].codes[layer][which]]
            for cache in stores[1:]:
                assert all(torch.equal(a, x[0]) for a, x in zip(first, cache.codes[layer][which]))
            if layer == 0:  # the first layer's keys and values are those of an exact cache: encode them in one go
                x = (plain.k, plain.v)[which][0][:1, :, :sealed]
                codec = make_codec(bits, axis, G, 8)
                for a, b, where in zip(first, codec.encode(x), codec.rows(0, sealed)):
                    assert torch.equal(a[:, where], b[0])


@pytest.mark.parametrize("bits", BITS)
def test_something_is_rounded_and_the_tail_is_not(bits):
    text = ids_for(2, [20])[0]
    options = {"k_bits": bits, "v_bits": bits, "group_size": 4, "residual_length": 4}
    cache = quantized(**options)
    got = feed(MODEL, cache, [text], [[20]])[0]
    plain = dense_logits(MODEL, text)
    assert_logits(got[:8], plain[:8])  # the queries 0 .. R + G - 1 see nothing rounded
    assert ((got - plain)[8:].abs().amax(-1) > 0).all()  # every later one does
    assert (got - plain).abs().max() < {8: 0.1, 4: 1, 2: 3, "fp8": 0.5, "fp8_e5m2": 1}[bits]


def test_16_bits_round_nothing_and_8_bits_less_than_4_and_2():
    text = ids_for(3, [24])[0]
    plain, error = dense_logits(MODEL, text), {}
    for bits in (16, 8, 4, 2):
        cache = quantized(k_bits=bits, v_bits=bits, group_size=4, residual_length=0)
        error[bits] = (feed(MODEL, cache, [text], [[24]])[0] - plain).abs().mean().item()
    assert error[16] < 1e-12 < error[8] < error[4] < error[2]


@pytest.mark.parametrize("R,G", [(0, 4), (3, 4), (8, 2), (16, 16)])
def test_the_tail_is_bounded_whatever_the_length(R, G):
    cache = quantized(max_length=200, group_size=G, residual_length=R, model=toy(seed=6, num_key_value_heads=1))
    held = None
    model = toy(seed=6, num_key_value_heads=1)
    for start in range(0, 160, 8):
        feed_from = ids_for(start, [8])
        call(model, cache, feed_from, [start])
        held = held or cache.nbytes
        assert cache.nbytes == held
        assert all(x.shape[2] == R + G for both in cache.tail.values() for x in both)
        for sealed in cache.sealed.values():
            assert 0 <= start + 8 - sealed[0] <= R + G + 8


@pytest.mark.parametrize("bits,ratio", [(8, 0.53125), (4, 0.28125), (2, 0.15625)])
def test_bytes_against_a_full_fp16_cache(bits, ratio):
    """Group size 64, fp16 scale and zero point: (bits*64/8 + 4)/128 of the full cache for what is sealed."""
    model = toy(seed=1, dtype=torch.float16, num_attention_heads=1, num_key_value_heads=1, head_dim=64)
    for axis in ("channel", "token"):
        cache = quantized(max_length=256, model=model, k_bits=bits, v_bits=bits, key_axis=axis)
        full = make_cache("full", model, 1, 256)
        for one in (cache, full):
            call(model, one, ids_for(5, [9]), [0])
        by = cache.nbytes_by()
        assert (by["keys"] + by["values"] + by["scales"]) / full.nbytes == ratio
        assert by["tail"] / full.nbytes == 128 / 256


def test_no_decoded_copy_is_kept():
    """What the cache holds is what it counts: no float copy of the sealed tokens stays between steps."""
    from cases import stored_tensors

    cache = quantized(max_length=400, k_bits=4, v_bits=4, group_size=8, residual_length=8)
    feed(MODEL, cache, ids_for(6, [300]), [[300]])
    call(MODEL, cache, [[1]], [300])
    counted = cache.nbytes
    kept = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in stored_tensors(cache)}.values())
    small = 8 * (300 + 3 * 300)  # positions of the last step
    assert counted <= kept <= counted + small
    sealed_as_float = 300 * 2 * 8 * 8
    assert not any(x.is_floating_point() and x.nbytes >= sealed_as_float for x in stored_tensors(cache))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_other_dtypes_stay_near_their_reference(dtype, bits):
    """A code may flip where float64 rounds the other way; then one number is off by one step, no more."""
    model, text = toy(seed=6, dtype=dtype), ids_for(7, [24])[0]
    options = {"k_bits": bits, "v_bits": bits, "group_size": 4, "residual_length": 3}
    got = feed(model, quantized(model=model, **options), [text], [[24]])[0]
    want = dense_logits(model, text, rule_of("quantized", options))
    gate = {torch.float32: 0.02, torch.float16: 0.1, torch.bfloat16: 0.6}[dtype] * (4 if bits in (2, "fp8_e5m2") else 1)
    assert (got.double() - want).abs().max() < gate
    assert torch.isfinite(got).all()


def test_bad_options():
    with pytest.raises(ValueError, match="key_axis='row' must be 'channel' .* or 'token'"):
        quantized(key_axis="row")
    with pytest.raises(ValueError, match="group_size=0 must be at least 1"):
        quantized(group_size=0)
    with pytest.raises(ValueError, match="residual_length=-1 must be at least 0"):
        quantized(residual_length=-1)
    with pytest.raises(TypeError, match="group_size=4.0 must be an int"):
        quantized(group_size=4.0)
    with pytest.raises(ValueError, match="3 bits are not known"):
        quantized(k_bits=3)
    with pytest.raises(ValueError, match="head_dim=6 does not fill bytes with 2-bit codes"):
        quantized(model=toy(head_dim=6), v_bits=2)
