"""Codes and scales: every code comes back, nothing is off by more than half a step, nothing becomes NaN."""

import numpy as np
import pytest
import torch
from oracles import round_fp8, rounded

from kvlab.caches.codecs import CastCodec, IntCodec, make_codec, pack, unpack

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INT = [(bits, axis) for bits in (8, 4, 2) for axis in ("token", "channel")]


def data(kind: str, dtype, shape=(2, 3, 32, 16)):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    if kind == "outlier channel":
        x[..., 3] *= 300
    elif kind == "wide":
        x = torch.where(x > 0, 65000.0, -65000.0)
    elif kind == "tiny":
        x = x * 1e-9
    elif kind == "subnormal":
        x = x * 2.0**-22
    elif kind == "far from zero":
        x = 1000 + x
    elif kind == "constant":
        x = torch.full(shape, 0.1, dtype=torch.float64)
    elif kind == "zero":
        x = torch.zeros(shape, dtype=torch.float64)
    return x.to(dtype)


KINDS = ["random", "outlier channel", "wide", "tiny", "subnormal", "far from zero", "constant", "zero"]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_code_survives_packing_beside_every_other(bits):
    n = 2**bits
    codes = torch.cartesian_prod(*[torch.arange(n, dtype=torch.uint8)] * 2).repeat(1, 2)  # (n*n, 4): each beside each
    packed = pack(codes, bits)
    assert packed.shape == (n * n, 4 * bits // 8) and packed.dtype == torch.uint8 and packed.is_contiguous()
    assert torch.equal(unpack(packed, bits), codes)


def test_the_first_of_the_neighbours_lies_in_the_lowest_bits():
    assert pack(torch.tensor([1, 15], dtype=torch.uint8), 4).tolist() == [0xF1]
    assert pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), 2).tolist() == [0b00_11_10_01]
    assert pack(torch.tensor([200, 7], dtype=torch.uint8), 8).tolist() == [200, 7]


@pytest.mark.parametrize("bits,axis", INT)
def test_all_codes_of_a_group_come_back(bits, axis):
    """Numbers that lie on the grid are exact: with 0 .. 2^bits - 1 in the group, the codes are those numbers."""
    n = 2**bits
    x = torch.arange(n, dtype=torch.float64).flip(0) * 0.5 - 3  # descending, from a negative zero point
    x = x.view(1, 1, n, 1).expand(1, 1, n, 4) if axis == "channel" else x.view(1, 1, 1, n)
    codec = IntCodec(bits, axis, n, x.shape[-1])
    packed, scale, zero = codec.encode(x)
    assert torch.equal(codec.decode(packed, scale, zero, x.dtype), x)
    assert (scale == 0.5).all() and (zero == -3).all() and scale.dtype == zero.dtype == torch.float16
    want = torch.arange(n).flip(0).to(torch.uint8)
    codes = unpack(packed, bits)
    assert torch.equal(codes, want.view(1, 1, n, 1).expand_as(codes) if axis == "channel" else want.view(1, 1, 1, n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits,axis", INT)
@pytest.mark.parametrize("group", [4, 16])
def test_error_is_at_most_half_a_step(kind, dtype, bits, axis, group):
    x = data(kind, dtype)
    codec = IntCodec(bits, axis, group, 16)
    packed, scale, zero = codec.encode(x)
    assert torch.isfinite(scale).all() and torch.isfinite(zero).all()
    y = codec.decode(packed, scale, zero, torch.float64)
    dim = 2 if axis == "channel" else 3
    steps = scale.double().repeat_interleave(group, dim)
    error = (y - x.double()).abs()
    slack = 1e-6 * (steps + x.double().abs().amax())  # of the float32 that it is computed in
    if dtype == torch.float64:
        slack = slack * 1e-9
    assert (error <= steps / 2 + slack).all(), f"{(error - steps / 2).max():.3g} over half a step"
    back = codec.decode(packed, scale, zero, dtype)
    assert back.dtype == dtype and back.shape == x.shape and torch.isfinite(back).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits,axis", INT)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.333251953125, 1000.0, -65504.0, 2.0**-24])
def test_constants_that_fp16_knows_are_exact(dtype, bits, axis, value):
    x = torch.full((1, 2, 8, 8), value).to(dtype)
    if dtype == torch.bfloat16 and float(x[0, 0, 0, 0]) not in (value,):
        x = torch.full((1, 2, 8, 8), -0.33203125, dtype=dtype)  # the nearest that bf16 knows; fp16 knows it too
    if abs(value) > 60000 and dtype == torch.bfloat16:
        x = torch.full((1, 2, 8, 8), -65280.0, dtype=dtype)
    codec = IntCodec(bits, axis, 4, 8)
    assert torch.equal(codec.decode(*codec.encode(x), dtype), x)


@pytest.mark.parametrize("bits,axis", INT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_values_beyond_fp16_saturate_and_stay_finite(bits, axis, dtype):
    x = data("random", dtype) * 1e6
    codec = IntCodec(bits, axis, 8, 16)
    y = codec.decode(*codec.encode(x), dtype)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("bits,axis", INT)
@pytest.mark.parametrize("kind", ["random", "outlier channel", "far from zero", "subnormal"])
def test_equal_to_the_reference_to_the_bit(bits, axis, kind):
    x = data(kind, torch.float64)
    codec = IntCodec(bits, axis, 8, 16)
    got = codec.decode(*codec.encode(x), torch.float64)
    for b in range(2):
        want = rounded(x[b].transpose(0, 1), bits, axis, 8).transpose(0, 1)
        torch.testing.assert_close(got[b], want, rtol=1e-14, atol=0)


def test_fewer_bits_lose_more():
    x, lost = data("random", torch.float64), []
    for bits in (8, 4, 2):
        codec = IntCodec(bits, "token", 16, 16)
        lost.append((codec.decode(*codec.encode(x), x.dtype) - x).abs().mean().item())
    assert 0 < lost[0] * 8 < lost[1] < lost[2] / 3


def test_per_channel_keys_survive_an_outlier_channel():
    """Why KIVI groups keys by channel: one large channel ruins the scale of its whole token otherwise."""
    x, lost = data("outlier channel", torch.float64), {}
    for axis in ("token", "channel"):
        codec = IntCodec(4, axis, 16, 16)
        error = (codec.decode(*codec.encode(x), x.dtype) - x).abs()
        lost[axis] = error[..., [i for i in range(16) if i != 3]].mean().item()
    assert lost["token"] > 5 * lost["channel"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name,largest", [("fp8", 448.0), ("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_clamps_to_its_largest_number(dtype, name, largest):
    codec = make_codec(name, "token", 64, 4)
    x = torch.tensor([-60000.0, -1.0, 0.4, 60000.0]).to(dtype).view(1, 1, 1, 4)
    (codes,) = codec.encode(x)
    assert codes.dtype == torch.uint8 and codes.nbytes == 4
    y = codec.decode(codes, dtype)
    assert y.dtype == dtype and y[0, 0, 0, 0] == -largest and y[0, 0, 0, 3] == largest and y[0, 0, 0, 1] == -1


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_takes_the_nearest_of_its_256_numbers(name):
    codec = make_codec(name, "token", 64, 16)
    for kind in ("random", "outlier channel"):
        x = data(kind, torch.float64)
        want = round_fp8(x.numpy(), codec.dtype)
        assert np.array_equal(codec.decode(*codec.encode(x), x.dtype).numpy(), want)


def test_fp8_has_no_nan_among_what_it_writes():
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codec = make_codec(name, "token", 64, 2)
        x = torch.tensor([float("inf"), -float("inf")]).view(1, 1, 1, 2)
        assert torch.isfinite(codec.decode(*codec.encode(x), torch.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_16_bits_are_the_numbers_as_given(dtype):
    codec = make_codec(16, "token", 64, 16)
    assert isinstance(codec, CastCodec)
    x = data("random", dtype)
    assert torch.equal(codec.decode(*codec.encode(x), dtype), x)


def test_what_cannot_be_packed_is_refused_by_name():
    with pytest.raises(ValueError, match="head_dim=7 does not fill bytes with 4-bit codes: it must be a multiple of 2"):
        make_codec(4, "token", 7, 7)
    with pytest.raises(ValueError, match="head_dim=6 does not fill bytes with 2-bit codes: it must be a multiple of 4"):
        make_codec(2, "channel", 4, 6)
    make_codec(8, "channel", 4, 7)
    with pytest.raises(ValueError, match="group_size=3 does not divide head_dim=8"):
        make_codec(8, "token", 3, 8)
    for bits in (3, 1, 0, True, None, "int8", "fp16", 2.5):
        with pytest.raises(ValueError, match=r"bits are not known; choose 8, 4, 2, 'fp8'"):
            make_codec(bits, "token", 8, 8)
