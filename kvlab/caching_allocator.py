"""A simulation of the rule by which PyTorch's CUDA caching allocator turns requests into memory. No torch, no GPU.

The rule, as the source states it (c10/cuda/CUDACachingAllocator.cpp, default settings, one stream):
- a request is rounded up to a multiple of 512 bytes: that is what memory_allocated counts;
- it is served from a free piece of a segment, the smallest that is large enough; a piece larger than needed is split,
  if at least 512 bytes (small pool) or more than 1 MiB (large pool) would be left over;
- without such a piece a new segment is asked from the driver: 2 MiB for requests up to 1 MiB (the small pool), 20 MiB
  for those under 10 MiB, and above that the request rounded up to 2 MiB. Segments are what memory_reserved counts;
- a freed piece joins free neighbours; a segment stays reserved until empty_cache() finds it entirely free.

It leaves out what depends on the driver: running out of memory, expandable segments, other streams.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

MIB = 2**20
SMALL = MIB  # the largest request of the small pool


def rounded(nbytes: int) -> int:
    """What a request of nbytes counts in memory_allocated."""
    return max(512, -(-nbytes // 512) * 512)


def segment_for(nbytes: int) -> int:
    """What the driver is asked for when no piece is free."""
    size = rounded(nbytes)
    return 2 * MIB if size <= SMALL else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


@dataclass
class _Piece:
    segment: int
    start: int
    size: int
    small: bool
    free: bool = True
    before: _Piece | None = field(default=None, repr=False)
    after: _Piece | None = field(default=None, repr=False)

    @property
    def key(self):
        return self.size, self.segment, self.start


class CachingAllocator:
    """malloc(nbytes) -> a handle for free(handle). Bytes: requested, allocated, reserved, and each one's peak."""

    def __init__(self):
        self.requested = self.allocated = self.reserved = 0
        self.peak_allocated = self.peak_reserved = self.segments_made = 0
        self._free: dict[bool, list] = {True: [], False: []}  # small pool?, its free pieces' keys, smallest first
        self._pieces: dict[tuple, _Piece] = {}
        self._held: dict[int, tuple[_Piece, int]] = {}
        self._handles = 0

    def malloc(self, nbytes: int) -> int:
        if nbytes < 1:
            raise ValueError(f"malloc({nbytes}): at least 1 byte")
        size = rounded(nbytes)
        piece = self._take(size) or self._segment(size)
        rest = piece.size - size
        if rest > SMALL or (piece.small and rest >= 512):
            self._put(_Piece(piece.segment, piece.start + size, rest, piece.small, True, piece, piece.after))
            piece.size = size
        piece.free = False
        self.requested += nbytes
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._handles += 1
        self._held[self._handles] = piece, nbytes
        return self._handles

    def free(self, handle: int) -> None:
        if handle not in self._held:
            raise ValueError(f"free({handle}): not allocated, or freed already")
        piece, nbytes = self._held.pop(handle)
        self.requested -= nbytes
        self.allocated -= piece.size
        for other in (piece.before, piece.after):
            if other is not None and other.free:
                self._remove(other)
                first, second = (other, piece) if other is piece.before else (piece, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                piece = first
        piece.free = True
        self._put(piece)

    def empty_cache(self) -> int:
        """Give back every segment that is entirely free -> bytes given back."""
        whole = [p for p in self._pieces.values() if p.before is None and p.after is None]
        for piece in whole:
            self._remove(piece)
        self.reserved -= sum(p.size for p in whole)
        return sum(p.size for p in whole)

    def _take(self, size: int) -> _Piece | None:
        free = self._free[size <= SMALL]
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        piece = self._pieces[free[at]]
        self._remove(piece)
        return piece

    def _segment(self, size: int) -> _Piece:
        nbytes = segment_for(size)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments_made += 1
        return _Piece(self.segments_made, 0, nbytes, size <= SMALL)

    def _put(self, piece: _Piece) -> None:
        for other, side in ((piece.before, "after"), (piece.after, "before")):
            if other is not None:
                setattr(other, side, piece)
        self._pieces[piece.key] = piece
        insort(self._free[piece.small], piece.key)

    def _remove(self, piece: _Piece) -> None:
        del self._pieces[piece.key]
        free = self._free[piece.small]
        del free[bisect_left(free, piece.key)]


def replay(changes: Iterable, allocator: CachingAllocator | None = None) -> list[tuple[int, int, int, int]]:
    """Play changes of kvlab.staircase -> (tokens, requested, allocated, reserved) after each step, in bytes."""
    a, held, rows = allocator or CachingAllocator(), {}, {}
    for tokens, tensor, nbytes in changes:
        if nbytes > 0:
            held[tensor] = a.malloc(nbytes)
        else:
            a.free(held.pop(tensor))
        rows[tokens] = tokens, a.requested, a.allocated, a.reserved
    return list(rows.values())
