"""The caches, and make_cache(), which knows them by name."""

from __future__ import annotations

import inspect

from kvlab.caches.adopt import adopt
from kvlab.caches.base import CacheFull, KVCache, NotOffered, RewindError, Step
from kvlab.caches.evicting import FirstLastCache, HeavyHitterCache, RandomEvictionCache
from kvlab.caches.full import FullCache, GrowingCache
from kvlab.caches.offloaded import OffloadedCache
from kvlab.caches.paged import PagedCache
from kvlab.caches.pool import BlockPool, PoolExhausted
from kvlab.caches.quantized import QuantizedCache
from kvlab.caches.shared import SharedLayersCache
from kvlab.caches.sliding import SlidingWindowCache
from kvlab.config import check_int

KINDS: dict[str, type[KVCache]] = {
    "growing": GrowingCache,
    "full": FullCache,
    "sliding": SlidingWindowCache,
    "quantized": QuantizedCache,
    "paged": PagedCache,
    "heavy_hitter": HeavyHitterCache,
    "random": RandomEvictionCache,
    "first_last": FirstLastCache,
    "shared": SharedLayersCache,
    "offloaded": OffloadedCache,
}


def make_cache(kind: str, model, batch_size: int = 1, max_length: int = 1024, **options) -> KVCache:
    """A cache of a named kind that fits the model.

    kind: growing, full, sliding, quantized, paged, heavy_hitter, random, first_last, shared or offloaded
    max_length: tokens per row (prompt and generated)
    options: sliding: window= (default: the model's sliding_window, else 256), sinks=0, sinks_at="text"|"cache"
             quantized: k_bits=8, v_bits=8 (8, 4, 2, "fp8", 16), key_axis="channel"|"token", group_size=64,
                        residual_length=64
             paged: block_size=16, num_blocks=None, pool=None (a BlockPool, which brings its own block_size)
             heavy_hitter: budget=256 (tokens kept by each head, or a table of them: layers, n_kv), recent=0.5 (a share
                        of the budget, or an int of tokens), grace=0
             random: the same, and seed=0. first_last: budget=256, first=4
             shared: owners= (for each layer the layer whose keys and values it uses) or every=2
             offloaded: device="cpu" (where keys and values are kept)
    Raises ValueError for an unknown kind or option, naming those that exist.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"cache kind {kind!r} is not known; kinds are {', '.join(KINDS)}")
    cls = KINDS[kind]
    known = [n for n in inspect.signature(cls).parameters if n not in ("batch_size", "max_length", "rope_freq", "dims")]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"a {kind} cache has no option {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    check_int("max_length", max_length)
    return cls.for_model(model, batch_size, max_length, **options)


__all__ = [
    "KINDS",
    "BlockPool",
    "CacheFull",
    "FirstLastCache",
    "FullCache",
    "GrowingCache",
    "HeavyHitterCache",
    "KVCache",
    "NotOffered",
    "OffloadedCache",
    "PagedCache",
    "PoolExhausted",
    "QuantizedCache",
    "RandomEvictionCache",
    "RewindError",
    "SharedLayersCache",
    "SlidingWindowCache",
    "Step",
    "adopt",
    "make_cache",
]
