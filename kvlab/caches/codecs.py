"""From numbers to packed bytes and back: int8, int4, int2 with a scale and zero point per group, and plain casts (fp8).

Integer codes are asymmetric: x = zero + scale * code, code in 0 .. 2^bits - 1. Scale and zero point are fp16, rounded
outwards so that the group's smallest and largest values stay in range: the error is at most scale / 2.
Shapes: x (B, n_kv, S, D); packed codes (B, n_kv, S, D * bits / 8) uint8; scale and zero point one number per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_MAX = torch.finfo(torch.float16).max


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2^bits (..., D) -> (..., D*bits/8): neighbours share a byte, the first in the lowest bits."""
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (-1, per_byte))
    packed = parts[..., 0]
    for i in range(1, per_byte):
        packed = packed | (parts[..., i] << (bits * i))
    return packed.contiguous()


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of pack(): (..., D*bits/8) -> (..., D)."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _half_at_most(x: Tensor) -> Tensor:
    """The largest fp16 number that is not above x (the smallest there is, for x below it)."""
    near = x.clamp(-HALF_MAX, HALF_MAX).half()
    bits = near.view(torch.int16)  # sign and magnitude: one more is one step away from zero
    below = torch.where(near > 0, bits - 1, bits + 1).masked_fill(near == 0, -0x7FFF).view(torch.float16)
    return torch.where((near.to(x.dtype) <= x) | (near == -HALF_MAX), near, below)


class IntCodec:
    """int8, int4 or int2 codes, with groups of `group` channels of one token, or of `group` tokens of one channel.

    axis "token":   each token has its own scales, one per `group` channels (values; what most engines do).
    axis "channel": each channel has its own scale over `group` tokens (keys in KIVI, arXiv 2402.02750).
    """

    def __init__(self, bits: int, axis: str, group: int, head_dim: int):
        if head_dim * bits % 8:
            raise ValueError(
                f"head_dim={head_dim} does not fill bytes with {bits}-bit codes: it must be a multiple of {8 // bits}"
            )
        if axis == "token":
            group = min(group, head_dim)  # a group does not reach beyond its head
            if head_dim % group:
                raise ValueError(f"group_size={group} does not divide head_dim={head_dim}")
        self.bits, self.axis, self.group, self.head_dim = bits, axis, group, head_dim

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, n_kv, S, D), S a multiple of group for axis "channel" -> packed codes, scale, zero point."""
        dim = 3 if self.axis == "channel" else 4  # the axis that shares a scale, once it is split off
        x = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(dim - 1, (-1, self.group))
        low, high = x.aminmax(dim=dim, keepdim=True)
        zero = _half_at_most(low)
        wide = (high - zero.to(x.dtype)) / (2**self.bits - 1)
        scale = -_half_at_most(-wide)
        step = scale.to(x.dtype)
        codes = (
            ((x - zero.to(x.dtype)) / torch.where(step > 0, step, 1)).round().clamp(0, 2**self.bits - 1).to(torch.uint8)
        )
        return pack(codes.flatten(dim - 1, dim), self.bits), scale.squeeze(dim), zero.squeeze(dim)

    def decode(self, packed: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of encode(), up to rounding -> (B, n_kv, S, D)."""
        dim = 3 if self.axis == "channel" else 4
        wide = torch.promote_types(dtype, torch.float32)  # code * scale would lose bits in a half type
        codes = unpack(packed, self.bits).to(wide).unflatten(dim - 1, (-1, self.group))
        x = torch.addcmul(zero.to(wide).unsqueeze(dim), codes, scale.to(wide).unsqueeze(dim))
        return x.flatten(dim - 1, dim).to(dtype)

    def empty(self, B: int, n_kv: int, S: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor, Tensor]:
        """Room for S tokens: codes, scales and zero points, all zero."""
        D, g = self.head_dim, self.group
        groups = (S // g, D) if self.axis == "channel" else (S, D // g)
        codes = torch.zeros(B, n_kv, S, D * self.bits // 8, dtype=torch.uint8, device=device)
        return codes, *(torch.zeros(B, n_kv, *groups, dtype=torch.float16, device=device) for _ in range(2))

    def rows(self, start: int, stop: int) -> tuple[slice, slice, slice]:
        """Where tokens start..stop-1 lie along axis 2 of codes, scales and zero points."""
        each = self.group if self.axis == "channel" else 1
        scales = slice(start // each, stop // each)
        return slice(start, stop), scales, scales


class CastCodec:
    """Another float type, without scales: fp8 e4m3 or e5m2 (as vLLM's fp8 cache), or the model's own (16)."""

    def __init__(self, dtype: torch.dtype | None, head_dim: int):
        self.dtype, self.head_dim = dtype, head_dim  # dtype None: as given

    def encode(self, x: Tensor) -> tuple[Tensor]:
        """Clamped to the largest finite value first: the cast alone would give NaN or infinity."""
        if self.dtype is None:
            return (x,)
        largest = torch.finfo(self.dtype).max
        return (x.clamp(-largest, largest).to(self.dtype).view(torch.uint8),)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.to(dtype) if self.dtype is None else codes.view(self.dtype).to(dtype)

    def empty(self, B: int, n_kv: int, S: int, dtype: torch.dtype, device) -> tuple[Tensor]:
        store = dtype if self.dtype is None else torch.uint8  # fp8 kept as bytes: few operations know the type itself
        return (torch.zeros(B, n_kv, S, self.head_dim, dtype=store, device=device),)

    def rows(self, start: int, stop: int) -> tuple[slice]:
        return (slice(start, stop),)


FLOATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, 16: None}


def make_codec(bits: int | str, axis: str, group: int, head_dim: int) -> IntCodec | CastCodec:
    """bits: 8, 4 or 2 (integer codes), "fp8" (= "fp8_e4m3"), "fp8_e5m2", or 16 (as the model gives it)."""
    known = isinstance(bits, (int, str))  # not 8.0, which counts no bytes
    if known and bits in FLOATS:
        return CastCodec(FLOATS[bits], head_dim)
    if not known or bits not in (8, 4, 2):
        raise ValueError(f"{bits!r} bits are not known; choose 8, 4, 2, 'fp8', 'fp8_e4m3', 'fp8_e5m2' or 16")
    return IntCodec(bits, axis, group, head_dim)
