"""What kvlab's own caches hold in bytes, all of it: keys, values, scales, tails, positions, tables.

The closed forms that the caches' docstrings state, computed without making one: tests hold them against real caches.
Loads no torch.
"""

from __future__ import annotations

import inspect

from kvlab.config import check_int, check_owners

from .architecture import Architecture
from .formats import Format
from .layers import Attention, Latent, Shared, round_up
from .reading import ConfigError, check_whole

INT64 = 8  # bytes of a position or a block id
INT32 = FP32 = 4  # bytes of a position, or a score, where every head has its own


def held_bytes(arch: Architecture, cache: str, lengths: list[int], dtype: Format, max_length=None, **options) -> int:
    """Bytes held by make_cache(cache, model, batch, max_length, **options) after `lengths` tokens in its rows.

    dtype: the model's own, which keys and values arrive in. max_length: default the longest row.
    Raises ConfigError for a kind or an option that make_cache does not have, and for a value that it refuses where the
    bytes would make no sense.
    """
    if cache not in _KINDS:
        raise ConfigError(f"cache kind {cache!r} is not known; kinds are {', '.join(_KINDS)}")
    if dtype.block != 1:
        raise ConfigError(
            f"cache={cache!r} stores the model's own numbers: kv_dtype {dtype.name} needs cache='quantized'"
        )
    for layer in arch.layers:
        if not isinstance(layer, (Attention, Latent, Shared)) or layer.kind == "cross":
            raise ConfigError(f"kvlab's caches keep attention's keys and values; this model has a {layer.kind} layer")
        if getattr(layer, "index_dim", 0):
            raise ConfigError(
                f"kvlab's caches keep no index for sparse attention; this model has one of {layer.index_dim}"
            )
    form = _KINDS[cache]
    known = [n for n in inspect.signature(form).parameters if n not in ("arch", "lengths", "size", "room")]
    if unknown := [n for n in options if n not in known]:
        raise ConfigError(f"a {cache} cache has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    for name, value in options.items():
        _check_value(name, value)
    room = max(lengths) if max_length is None else check_whole("max_length", max_length)
    if room < max(lengths) and cache not in ("sliding", *_EVICTING):
        raise ConfigError(f"seq_len={max(lengths)} does not fit max_length={room}")
    return form(arch, lengths, dtype.block_bytes, room, **options)


_LEAST = {"window": 1, "sinks": 0, "group_size": 1, "residual_length": 0, "block_size": 1, "num_blocks": 1}
_BITS = (8, 4, 2, 16, "fp8", "fp8_e4m3", "fp8_e5m2")
_CHOICES = {"sinks_at": ("text", "cache"), "key_axis": ("channel", "token"), "k_bits": _BITS, "v_bits": _BITS}


def _check_value(name: str, value) -> None:
    if name in _LEAST and value is not None:
        check_whole(name, value, _LEAST[name])
    if name in _CHOICES and (isinstance(value, float) or value not in _CHOICES[name]):
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(str, _CHOICES[name]))}")


def _token(arch: Architecture) -> int:
    """Numbers that one token adds in all layers: keys and values."""
    return sum(heads * (key + value) for heads, key, value in map(_stored, arch.layers))


def _stored(layer: Attention | Latent | Shared) -> tuple[int, int, int]:
    """(heads, numbers in a key, numbers in a value); a latent is the key, its turned part the value."""
    if isinstance(layer, Shared):
        return 0, 0, 0
    if isinstance(layer, Latent):
        return 1, layer.rank, layer.rope_dim
    return layer.kv_heads, layer.head_dim, layer.v_head_dim


def _growing(arch, lengths, size, room):
    columns = max(lengths)  # shorter rows are padded
    return len(lengths) * columns * (_token(arch) * size + INT64)


def _full(arch, lengths, size, room):
    return len(lengths) * room * _token(arch) * size


def _shared(arch, lengths, size, room, owners=None, every=None):
    try:
        if owners is not None and every is not None:
            raise ValueError(f"owners={owners!r} and every={every!r} say the same thing twice: give one of them")
        every, layers = 2 if every is None else every, range(len(arch.layers))
        check_int("every", every)
        owners = [i - i % every for i in layers] if owners is None else check_owners(owners, len(layers), "owners")
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    keep = {owners[i] for i in layers if not isinstance(arch.layers[i], Shared)}
    numbers = sum(heads * (key + value) for heads, key, value in (_stored(arch.layers[i]) for i in keep))
    return len(lengths) * room * numbers * size


def _offloaded(arch, lengths, size, room, device="cpu"):
    return _full(arch, lengths, size, room)  # wherever that is


def _sliding(arch, lengths, size, room, window=None, sinks=0, sinks_at="text"):
    if window is None:  # the model's own, where it has layers that use one
        window = next((w for w in (getattr(x, "window", None) for x in arch.layers) if w), 256)
    if sinks_at == "cache" and sinks and any(isinstance(x, Latent) for x in arch.layers):
        raise ConfigError("sinks_at='cache' turns stored keys, and a latent is not one: use sinks_at='text'")
    originals = sum(heads * key for heads, key, _ in map(_stored, arch.layers)) * sinks if sinks_at == "cache" else 0
    return len(lengths) * ((window + sinks) * _token(arch) + originals) * size


def _quantized(arch, lengths, size, room, k_bits=8, v_bits=8, key_axis="channel", group_size=64, residual_length=64):
    sealed = room // group_size * group_size
    tail = min(residual_length + group_size, room)
    total = tail * _token(arch) * size
    for heads, key, value in filter(all, map(_stored, arch.layers)):
        total += heads * _codes(k_bits, key_axis, group_size, sealed, key, size)
        total += heads * _codes(v_bits, "token", group_size, sealed, value, size)
    return len(lengths) * total


def _codes(bits, axis, group, tokens, head_dim, size):
    """Codes of `tokens` tokens of one head, with an fp16 scale and an fp16 zero point for each group."""
    if bits == 16:
        return tokens * head_dim * size
    if not isinstance(bits, int):  # fp8: no scales
        return tokens * head_dim
    if head_dim * bits % 8 or (axis == "token" and head_dim % min(group, head_dim)):
        raise ConfigError(
            f"head_dim={head_dim} cannot be cut into groups of {group}, or whole bytes, of {bits}-bit codes"
        )
    groups = tokens // group * head_dim if axis == "channel" else tokens * (head_dim // min(group, head_dim))
    return tokens * head_dim * bits // 8 + 4 * groups


def _paged(arch, lengths, size, room, block_size=16, num_blocks=None):
    blocks = num_blocks or len(lengths) * (round_up(room, block_size) // block_size)
    table = round_up(max(lengths), block_size) // block_size
    return blocks * block_size * _token(arch) * size + INT64 * len(lengths) * table


def _evicting(arch, lengths, size, room, budget, scores=0):
    """Slots of every head, each with a key, a value, an int32 position and, where kept, a score."""
    stored = [_stored(layer) for layer in arch.layers]
    if isinstance(budget, int):
        check_whole("budget", budget)
        budget = [[budget] * heads for heads, _, _ in stored]
    table = budget if isinstance(budget, (list, tuple)) and all(isinstance(x, (list, tuple)) for x in budget) else []
    if len(table) != len(stored) or any(heads not in (0, len(row)) for (heads, _, _), row in zip(stored, table)):
        raise ConfigError(f"budget={budget!r} must be an int, or a table with an entry for each head of each layer")
    for n in (n for row in table for n in row):
        check_whole("budget", n)
    if max(lengths) > room < max(map(max, table)):
        raise ConfigError(f"seq_len={max(lengths)} does not fit max_length={room}")
    return len(lengths) * sum(
        min(n, room) * ((key + value) * size + INT32 + scores)
        for row, (heads, key, value) in zip(table, stored)
        for n in row[:heads]
    )


def _heavy_hitter(arch, lengths, size, room, budget=256, recent=0.5, grace=0):
    return _evicting(arch, lengths, size, room, budget, scores=max(FP32, size))


def _random(arch, lengths, size, room, budget=256, recent=0.5, grace=0, seed=0):
    return _evicting(arch, lengths, size, room, budget)


def _first_last(arch, lengths, size, room, budget=256, first=4):
    return _evicting(arch, lengths, size, room, budget)


_EVICTING = {"heavy_hitter": _heavy_hitter, "random": _random, "first_last": _first_last}
_KINDS = {
    "growing": _growing,
    "full": _full,
    "sliding": _sliding,
    "quantized": _quantized,
    "paged": _paged,
    **_EVICTING,
    "shared": _shared,
    "offloaded": _offloaded,
}
