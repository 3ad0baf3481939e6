"""Attention over a QuantizedCache without decoding it: scales and zero points go to where there are fewer numbers.

A stored number is zero + scale * code, the scale shared by a group. So the sums of attention come apart:

    q . k   = sum_d (q_d scale_d) code_d + sum_d q_d zero_d      per-channel keys: one folded q and one bias a group
            = sum_g scale_g (q_g . code_g) + zero_g sum(q_g)     per-token keys: the scale on the scores
    w . v_d = sum_s (w_s scale_s) code_sd + sum_s w_s zero_s     per-token values: the scale on the weights

and the S x D multiplications and additions of decoding become one for each group. The codes themselves are multiplied,
so they must be floats: outside of a fused kernel (KIVI's, arXiv 2402.02750) that is a temporary as large as the decoded
keys. `tile` bounds it, for either way.
Shapes: q (B, H, T, D), here folded to (B, n_kv, M, D) with M = T * H / n_kv; S sealed tokens, R in the tail.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.caches.codecs import CastCodec, IntCodec, unpack
from kvlab.caches.quantized import QuantizedCache
from kvlab.config import check_int


def attend_codes(
    q: Tensor, cache: QuantizedCache, layer: int, *, fold: bool = True, tile: int | None = None, scale=None
) -> Tensor:
    """One query per head over all that the cache holds of a layer -> (B, H, 1, Dv), in the dtype of q.

    q: (B, H, 1, D), rotated: the newest token's, whose key the cache has. So nothing is masked.
    fold: False decodes (as the cache's own view does); True folds scales and zero points. Equal up to rounding.
    tile: sealed tokens turned into floats at a time, a multiple of group_size; None: all of them, one temporary.
    scale: factor on q.k, default 1/sqrt(D).
    Raises ValueError for more than one query, for rows of different lengths, and for a tile that splits a group.
    """
    S = _check(q, cache, layer, tile)
    (B, H, T, D), n_kv, tails = q.shape, cache.tail[layer][0].shape[1], _tails(cache, layer, S)
    q = q.reshape(B, n_kv, H // n_kv, D) * (D**-0.5 if scale is None else scale)
    tiles = [(a, min(a + (tile or S), S)) for a in range(0, S, tile or max(S, 1))]
    k_codec, v_codec = cache.codecs
    k_codes, v_codes = cache.codes[layer]

    scores = [_scores(q, k_codec, _part(k_codec, k_codes, *at), fold) for at in tiles]
    scores.append(q @ tails[0].transpose(2, 3))
    weights = torch.cat(scores, -1).softmax(-1)
    y = weights[..., S:] @ tails[1]
    for start, stop in tiles:
        y = y + _weighted(weights[..., start:stop], v_codec, _part(v_codec, v_codes, start, stop), fold)
    return y.reshape(B, H, T, -1)


def _scores(q: Tensor, codec, part: tuple[Tensor, ...], fold: bool) -> Tensor:
    """q . k for the keys stored in `part` -> (B, n_kv, M, S)."""
    if not fold or isinstance(codec, CastCodec):  # a cast has no scale to fold
        return q @ codec.decode(*part, dtype=q.dtype).transpose(2, 3)
    codes, scale, zero = _floats(codec, part, q.dtype)
    if codec.axis == "channel":  # codes (B, n_kv, S, D), scale and zero (B, n_kv, S/group, D)
        folded = q[:, :, None] * scale[:, :, :, None]  # (B, n_kv, groups, M, D): q once for each group
        bias = q @ zero.transpose(2, 3)  # (B, n_kv, M, groups)
        dots = folded @ codes.unflatten(2, (-1, codec.group)).transpose(3, 4)  # (B, n_kv, groups, M, group)
        return (dots.transpose(2, 3) + bias[..., None]).flatten(3)
    q = q.unflatten(3, (-1, codec.group)).transpose(2, 3)  # (B, n_kv, D/group, M, group)
    dots = q @ codes.unflatten(3, (-1, codec.group)).permute(0, 1, 3, 4, 2)  # (B, n_kv, D/group, M, S)
    dots = dots * scale.transpose(2, 3)[:, :, :, None]
    return (dots + q.sum(-1, keepdim=True) * zero.transpose(2, 3)[:, :, :, None]).sum(2)


def _weighted(weights: Tensor, codec, part: tuple[Tensor, ...], fold: bool) -> Tensor:
    """weights (B, n_kv, M, S) times the values stored in `part` -> (B, n_kv, M, Dv)."""
    if not fold or isinstance(codec, CastCodec):
        return weights @ codec.decode(*part, dtype=weights.dtype)
    codes, scale, zero = _floats(codec, part, weights.dtype)  # per token: scale and zero (B, n_kv, S, Dv/group)
    folded = weights[:, :, None] * scale.transpose(2, 3)[:, :, :, None]  # (B, n_kv, Dv/group, M, S)
    y = folded @ codes.unflatten(3, (-1, codec.group)).transpose(2, 3)  # (B, n_kv, Dv/group, M, group)
    bias = weights @ zero  # (B, n_kv, M, Dv/group): one number for all channels of a group
    return (y + bias.transpose(2, 3)[..., None]).transpose(2, 3).flatten(3)


def _part(codec, codes: tuple[Tensor, ...], start: int, stop: int) -> tuple[Tensor, ...]:
    return tuple(c[:, :, where] for c, where in zip(codes, codec.rows(start, stop)))


def _floats(codec: IntCodec, part: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return unpack(part[0], codec.bits).to(dtype), part[1].to(dtype), part[2].to(dtype)


def _tails(cache: QuantizedCache, layer: int, S: int) -> tuple[Tensor, Tensor]:
    """Keys and values that are not sealed, in order of position, each (B, n_kv, R, D)."""
    order = torch.arange(S, cache.lengths[0], device=cache.device) % cache.tail_slots
    return tuple(x[:, :, order] for x in cache.tail[layer])


def _check(q: Tensor, cache, layer: int, tile: int | None) -> int:
    """How many tokens are sealed, in every row alike."""
    if not isinstance(cache, QuantizedCache):
        raise TypeError(f"cache is a {type(cache).__name__}; only a QuantizedCache has codes")
    if layer not in cache.codes:
        raise ValueError(f"layer {layer!r} holds nothing yet; the cache has layers {sorted(cache.codes)}")
    B, n_kv, _, D = cache.tail[layer][0].shape
    if q.dim() != 4 or q.shape[0] != B or q.shape[1] % n_kv or q.shape[2:] != (1, D):
        raise ValueError(
            f"q has shape {tuple(q.shape)}; it must be ({B}, a multiple of {n_kv}, 1, {D}): one query a head"
        )
    if len(set(cache.lengths)) > 1:
        raise ValueError(f"the rows hold {cache.lengths} tokens; attend_codes takes rows of one length")
    if tile is not None:
        check_int("tile", tile)
        if tile % cache.group:
            raise ValueError(f"tile={tile} splits groups: it must be a multiple of group_size={cache.group}")
    return cache.sealed[layer][0]
