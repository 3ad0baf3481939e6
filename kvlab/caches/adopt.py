"""adopt(): any object with an append method as a full KVCache."""

from __future__ import annotations

from kvlab.attention import View
from kvlab.caches.base import KVCache, NotOffered


class Adopted(KVCache):
    """An object with nothing but append(layer, k, v, pos), given the rest of the interface."""

    def __init__(self, inner, batch_size: int, max_length: int | None = None):
        super().__init__(batch_size, max_length)
        self.inner = inner

    def append(self, layer, k, v, pos) -> View:
        return self.inner.append(layer, k, v, pos)

    @property
    def wants_weights(self) -> bool:
        return getattr(self.inner, "wants_weights", False)

    def observe(self, layer, weights) -> None:
        self.inner.observe(layer, weights)

    def max_chunk(self, T: int) -> int:
        return self.inner.max_chunk(T) if hasattr(self.inner, "max_chunk") else T

    def advance(self, pos) -> None:
        if hasattr(self.inner, "advance"):
            self.inner.advance(pos)
        super().advance(pos)

    def nbytes_by(self) -> dict[str, int]:
        return self._ask("nbytes_by")

    def reorder(self, rows) -> None:
        self._ask("reorder", rows)
        self.lengths = [self.lengths[r] for r in rows]

    def rewind(self, n) -> None:
        self._ask("rewind", n)
        each = [n] * self.batch_size if isinstance(n, int) else n
        self.lengths = [length - x for length, x in zip(self.lengths, each)]

    def fork(self) -> KVCache:
        twin = Adopted(self._ask("fork"), self.batch_size, self.max_length)
        twin.lengths = list(self.lengths)
        return twin

    def _ask(self, name: str, *args):
        if not hasattr(self.inner, name):
            raise NotOffered(f"{type(self.inner).__name__} does not offer {name}")
        return getattr(self.inner, name)(*args)


def adopt(cache, batch_size: int = 1, max_length: int | None = None) -> KVCache:
    """The cache itself if it is a KVCache; any other object with an append method is wrapped."""
    if isinstance(cache, KVCache):
        return cache
    if not callable(getattr(cache, "append", None)):
        raise TypeError(f"{type(cache).__name__} has no append(layer, k, v, pos): it is not a cache")
    return Adopted(cache, batch_size, max_length)
