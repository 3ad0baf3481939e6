"""Which cache is meant: a kind, a kind with options, or a function that makes one. And whether it can be used."""

from __future__ import annotations

from collections.abc import Mapping

from kvlab.caches import make_cache
from kvlab.caches.adopt import adopt
from kvlab.caches.base import KVCache
from kvlab.words import kind_of


def cache_from(spec, model, batch_size: int, max_length: int, name: str = "cache") -> KVCache:
    """A new, empty cache for batch_size rows of max_length tokens.

    spec: a kind ("full"), a kind and its options ("sliding", {"window": 64}), or a function of (model, batch_size,
    max_length) that returns a cache; any object with append will do.
    Raises TypeError or ValueError, which begin with `name`, for another spec and for a cache that does not fit.
    """
    if isinstance(spec, str):
        spec = spec, {}
    if isinstance(spec, tuple):
        if len(spec) != 2 or not isinstance(spec[1], Mapping):
            raise TypeError(
                f"{name}: {spec!r} must be a kind and a dict of its options, as ('sliding', {{'window': 64}})"
            )
        build = lambda: make_cache(spec[0], model, batch_size, max_length, **spec[1])  # noqa: E731
    elif callable(spec) and not isinstance(spec, KVCache):
        build = lambda: adopt(spec(model, batch_size, max_length), batch_size, max_length)  # noqa: E731
    else:
        raise TypeError(
            f"{name} is {kind_of(spec)}; it must be a kind, (kind, options), or a function of (model, batch_size, "
            "max_length) that returns a new cache"
        )
    try:
        cache = build()
    except (TypeError, ValueError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
    if cache.batch_size != batch_size:
        raise ValueError(f"{name}: its cache has {cache.batch_size} rows, the text has {batch_size}")
    if any(cache.lengths):
        raise ValueError(
            f"{name}: its cache holds {max(cache.lengths)} tokens already; the function must make a new one"
        )
    cache.check_room(cache.next_positions(max_length))
    return cache


def caches_from(specs, model, batch_size: int, max_length: int) -> dict[object, KVCache]:
    """All of them, before anything runs: most allocate at their first token, so that this costs nothing."""
    if not isinstance(specs, Mapping):
        raise TypeError(f"caches must be a dict of names and caches, not {kind_of(specs)}")
    if not specs:
        raise ValueError("caches is empty: name at least one cache")
    made: dict[object, KVCache] = {}
    for name, spec in specs.items():
        cache = cache_from(spec, model, batch_size, max_length, str(name))
        if twin := next((other for other, c in made.items() if c is cache), None):
            raise ValueError(f"{name}: its function returned the same cache as {twin}'s; each needs a new one")
        made[name] = cache
    return made
