"""What rounding does to keys and values: error by channel, by layer and by token, bytes, and the work of using codes.

The measurements behind notebook 05; plots/quantized.py draws them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.caches.codecs import make_codec
from kvlab.caches.quantized import QuantizedCache
from kvlab.config import ModelConfig
from kvlab.measure import count_flops, memory
from kvlab.measure.watch import Watch, layer_outputs


@torch.no_grad()
def keys_values(model, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A model's keys (rotated, as cached) and values for the text ids (1, N) -> two tensors (layers, n_kv, N, D)."""
    cache = make_cache("full", model, 1, ids.shape[1])
    model(ids, cache, logits_to_keep=1)
    return tuple(torch.stack([x[i][0, :, : ids.shape[1]] for i in sorted(x)]) for x in (cache.k, cache.v))


def rounded(x: Tensor, bits: int | str, axis: str, group: int = 64) -> Tensor:
    """x (..., n_kv, S, D) encoded and decoded; with axis "channel", only the whole groups of tokens are kept.

    Raises ValueError where there is no whole group.
    """
    codec = make_codec(bits, axis, group, x.shape[-1])
    if axis == "channel" and x.shape[-2] < group:
        raise ValueError(f"{x.shape[-2]} tokens make no whole group of {group}: give more, or a smaller group")
    S = x.shape[-2] // group * group if axis == "channel" else x.shape[-2]
    flat = x[..., :S, :].reshape(-1, *x.shape[-3:-2], S, x.shape[-1])
    return codec.decode(*codec.encode(flat), dtype=x.dtype).reshape(*x.shape[:-2], S, x.shape[-1])


def relative_error(x: Tensor, bits: int | str, axis: str, group: int = 64) -> float:
    """Root mean square error of rounding x (..., n_kv, S, D), as a share of x's own root mean square."""
    y = rounded(x, bits, axis, group)
    x = x[..., : y.shape[-2], :]
    return ((y - x).square().mean() / x.square().mean()).sqrt().item()


def outliers(x: Tensor) -> Tensor:
    """Mean |x| of each channel, in multiples of its head's median: (layers, n_kv, S, D) -> (layers, n_kv, D)."""
    size = x.abs().mean(2)
    return size / size.median(-1, keepdim=True).values


@torch.no_grad()
def error_by_layer(model, ids: Tensor, caches: dict[str, tuple[str, dict]], chunk: int = 64) -> dict[str, Tensor]:
    """How far the hidden states are from the full cache's, |x - full| / |full| -> {name: (layers, N)}.

    caches: {name: (kind, options)}; the text ids (1, N) is streamed through each, `chunk` tokens at a time.
    """

    def states(kind, options):
        cache = make_cache(kind, model, 1, ids.shape[1], **options)
        with layer_outputs(model) as kept:
            for part in ids.split(chunk, 1):
                model(part, cache, logits_to_keep=1)
        return torch.stack([torch.cat(of, 1)[0] for of in kept])  # (layers, N, C)

    full = states("full", {})
    return {name: (states(*spec) - full).norm(dim=-1) / full.norm(dim=-1) for name, spec in caches.items()}


def one_layer_cache(k: Tensor, v: Tensor, **options) -> QuantizedCache:
    """A QuantizedCache (options: see there) of one layer, fed k, v (B, n_kv, S, D), the last token alone."""
    B, S = k.shape[0], k.shape[2]
    cache, done = QuantizedCache(B, S, **options), 0
    while done < S:
        T = min(cache.max_chunk(max(1, S - 1 - done)), max(1, S - 1 - done))
        pos = torch.arange(done, done + T, device=k.device).expand(B, T)
        cache.append(0, k[:, :, done : done + T], v[:, :, done : done + T], pos)
        cache.advance(pos)
        done += T
    return cache


# ---- bytes -------------------------------------------------------------------------------------------------------


def held(
    config: ModelConfig, tokens: int, bits: int | str, axis: str = "channel", group: int = 64, residual: int = 0,
    itemsize: int = 2, v_bits: int | str | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of a QuantizedCache made for `tokens` tokens of one sequence: {"codes", "scales", "tail"}, in closed form.

    itemsize: bytes of a number of the model itself, in which the tail is kept (2: fp16). Bits 16 stay as they are.
    """
    heads, k_dim, v_dim = config.kv_shape
    per_layer, sealed = {"codes": 0, "scales": 0, "tail": 0}, tokens // group * group
    for b, a, dim in ((bits, axis, k_dim), (bits if v_bits is None else v_bits, "token", v_dim)):
        codec = make_codec(b, a, group, dim)
        stores = codec.empty(1, 1, sealed, torch.float16 if itemsize == 2 else torch.float32, "meta")
        per_layer["codes"] += stores[0].nbytes
        per_layer["scales"] += sum(s.nbytes for s in stores[1:])
    per_layer["tail"] = min(residual + group, tokens) * (k_dim + v_dim) * itemsize
    return {part: n * len(config.kv_layers) * heads for part, n in per_layer.items()}


# ---- work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one call did. products, elementwise: FLOPs of matrix products, and of +, - and * number by number.

    written: bytes of all tensors that it made; peak: the most of them that existed at once.
    """

    products: int
    elementwise: int
    written: int
    peak: int


_FLOPS = {"mul": 1, "add": 1, "sub": 1, "div": 1, "addcmul": 2}


@torch.no_grad()
def work(call, device="cpu") -> Work:
    """Runs call() under the lab's instruments, once under each -> Work. It must give the same each time."""
    found = {"elementwise": 0}

    def run(func, args, kwargs):
        out = func(*args, **kwargs)
        each = _FLOPS.get(func._overloadpacket.__name__.rstrip("_"), 0)
        if each and isinstance(out, Tensor) and out.is_floating_point():
            found["elementwise"] += each * out.numel()
        return out

    with Watch(run):
        call()
    with count_flops() as flops:
        call()
    with memory(device, counted=True) as m:
        call()
    levels = [0, *(event.live for event in m.timeline)]
    written = sum(max(0, b - a) for a, b in zip(levels, levels[1:]))
    return Work(flops.total, found["elementwise"], written, m.peak)
