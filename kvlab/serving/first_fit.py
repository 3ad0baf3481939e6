"""A first-fit allocator of contiguous ranges: what paging does without. Pure Python, no torch.

Each request's keys lie in one range of slots. Ranges of many sizes come and go, and leave gaps: an allocation may fail
though more than it needs is free, because no gap is long enough. That is external fragmentation.
"""

from __future__ import annotations

from bisect import bisect_left

from kvlab.config import check_int


class FirstFit:
    """Slots 0 .. size - 1. `gaps` lists the free ranges, as (start, length), by start; no two of them touch.

    allocate(n) takes the first gap that is long enough, at its start (Knuth, The Art of Computer Programming 2.5).
    """

    def __init__(self, size: int):
        check_int("size", size)
        self.size = self.free = size
        self.gaps: list[tuple[int, int]] = [(0, size)]
        self.held: dict[int, int] = {}  # start -> length of each range in use

    def allocate(self, n: int) -> int | None:
        """The start of n slots, or None if no gap is that long: see `free` for what all gaps together have."""
        check_int("n", n)
        for i, (start, length) in enumerate(self.gaps):
            if length >= n:
                self.gaps[i : i + 1] = [(start + n, length - n)] if length > n else []
                self.held[start] = n
                self.free -= n
                return start
        return None

    def extend(self, start: int, n: int) -> bool:
        """Make the range at `start` n slots long without moving it -> False if the slots behind it are not free."""
        more = n - self._length(start)
        if more <= 0:
            raise ValueError(f"the range at {start} has {self.held[start]} slots already: cannot extend it to {n}")
        end = start + self.held[start]
        i = bisect_left(self.gaps, (end, 0))
        if i == len(self.gaps) or self.gaps[i][0] != end or self.gaps[i][1] < more:
            return False
        length = self.gaps[i][1]
        self.gaps[i : i + 1] = [(end + more, length - more)] if length > more else []
        self.held[start] = n
        self.free -= more
        return True

    def release(self, start: int) -> int:
        """Free the range at `start` and join it with the gaps beside it -> its length."""
        n = length = self._length(start)
        del self.held[start]
        self.free += n
        i = bisect_left(self.gaps, (start, 0))
        if i < len(self.gaps) and self.gaps[i][0] == start + n:
            length += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == start:
            start, before = self.gaps[i - 1]
            self.gaps[i - 1] = (start, before + length)
        else:
            self.gaps.insert(i, (start, length))
        return n

    @property
    def largest_gap(self) -> int:
        """The longest range that can be allocated now."""
        return max((length for _, length in self.gaps), default=0)

    @property
    def fragmentation(self) -> float:
        """External fragmentation: the part of the free slots that lies outside the largest gap, 0 to 1."""
        return 1 - self.largest_gap / self.free if self.free else 0.0

    def check(self) -> None:
        """Raises RuntimeError unless ranges and gaps cover every slot once, and no two gaps touch."""
        end, was_gap = 0, False
        for start, length, is_gap in sorted(
            [(*gap, True) for gap in self.gaps] + [(*held, False) for held in self.held.items()]
        ):
            if start != end or length < 1:
                raise RuntimeError(f"slots {start} to {start + length - 1} follow slot {end - 1}: a hole or an overlap")
            if is_gap and was_gap:
                raise RuntimeError(f"the gap at {start} was not joined with the one before it")
            end, was_gap = start + length, is_gap
        if end != self.size or sum(length for _, length in self.gaps) != self.free:
            raise RuntimeError(f"the ranges end at {end} of {self.size} slots, {self.free} of them counted as free")

    def _length(self, start: int) -> int:
        if start not in self.held:
            raise ValueError(f"no range in use starts at slot {start}")
        return self.held[start]
