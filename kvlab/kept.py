"""Which tokens a cache that evicts still holds, noted while it reads a text: for pictures and for curiosity."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.caches.budgeted import EvictingCache
from kvlab.config import check_int


def held_positions(cache: EvictingCache, row: int = 0) -> Tensor:
    """The positions that each head holds in one row -> int32 (layers, n_kv, S), in any order; -1: an empty slot.

    Layers and heads with a smaller budget than the largest have empty slots behind.
    """
    layers = sorted(cache.pos)
    most = max(cache.slots[i].most for i in layers)
    out = [cache.slots[i].by_head(cache.pos[i], most, nothing=-1)[row].cpu() for i in layers]
    return torch.stack([torch.nn.functional.pad(x, (0, most - x.shape[1]), value=-1) for x in out])


class Kept:
    """A spec for quality.evaluate() that also notes, every few tokens, what the cache's heads hold.

        kept = Kept("heavy_hitter", budget=100)
        evaluate(model, ids, {"heavy hitters": kept})
        kept.grid(layer=3, head=0)

    kind, options: as make_cache takes them, of a kind that evicts. every: tokens between two notes.
    lengths: tokens of the text at each note; notes: held_positions() then. cache: the cache itself, when it has read.
    """

    def __init__(self, kind: str, every: int = 8, **options):
        self.kind, self.options = kind, options
        self.every = check_int("every", every) or every
        self.lengths: list[int] = []
        self.notes: list[Tensor] = []
        self.cache: EvictingCache | None = None

    def __call__(self, model, batch_size: int, max_length: int) -> EvictingCache:
        cache = make_cache(self.kind, model, batch_size, max_length, **self.options)
        if not isinstance(cache, EvictingCache):
            raise ValueError(f"kind {self.kind!r} evicts nothing: it must be heavy_hitter, random or first_last")
        advance, self.lengths, self.notes, self.cache = cache.advance, [], [], cache

        def advance_and_note(pos: Tensor) -> None:
            advance(pos)
            if cache.lengths[0] >= (self.lengths[-1] if self.lengths else 0) + self.every:
                self.lengths.append(cache.lengths[0])
                self.notes.append(held_positions(cache))

        cache.advance = advance_and_note
        return cache

    def grid(self, layer: int, head: int, cells: int = 64) -> tuple[list[list[float | None]], int]:
        """Text against time: rows of token positions, `cells` of them at most, a column for each note. A cell is the
        share of its tokens that the head still holds, None where none of them has been read -> (rows, tokens a row).
        """
        if not self.notes:
            raise ValueError("nothing has been noted yet: give this spec to quality.evaluate() first")
        wide = -(-self.lengths[-1] // cells)
        rows = [[None] * len(self.notes) for _ in range(-(-self.lengths[-1] // wide))]
        for column, (n, note) in enumerate(zip(self.lengths, self.notes)):
            held = note[layer, head]
            counts = torch.bincount(held[held >= 0].long() // wide, minlength=len(rows)).tolist()
            for i, count in enumerate(counts):
                if read := min(n - i * wide, wide) if n > i * wide else 0:
                    rows[i][column] = count / read
        return rows, wide


def heaviest(cache: EvictingCache, layer: int, head: int, most: int = 12) -> list[tuple[int, float]]:
    """The tokens of row 0 that a head of a HeavyHitterCache has weighed most: (position, attention drawn so far)."""
    slots = cache.slots[layer]
    pos = slots.by_head(cache.pos[layer], slots.most, nothing=-1)[0, head]
    score = slots.by_head(cache.score[layer], slots.most)[0, head].masked_fill(pos < 0, -1)
    best = score.argsort(descending=True)[:most]
    return [(p, s) for p, s in zip(pos[best].tolist(), score[best].tolist()) if p >= 0]
