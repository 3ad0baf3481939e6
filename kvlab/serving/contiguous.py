"""Before paging: each request's keys in one contiguous range, of max_model_len slots or of a power of two.

vLLM's paper (arXiv 2309.06180, section 3.1) tells what that wastes: slots that are reserved and not used yet, or never
(internal fragmentation), and gaps too short for the next range (external fragmentation).
"""

from __future__ import annotations

from kvlab.config import check_int
from kvlab.serving.allocator import Allocator, Piece
from kvlab.serving.first_fit import FirstFit
from kvlab.serving.request import Request


class ContiguousAllocator(Allocator):
    """One range a request, from a first-fit memory. Write room(tokens): how long a range for that many tokens is.

    A range grows in place if the slots behind it are free; else its tokens move to a new range, which must be found
    while the old one is still held. moved_tokens counts them.
    failures: how often no range was found. gap_failures: how often that was so though enough slots were free, only not
    side by side; most_free_at_failure is the largest share of the memory that was free then.
    """

    def __init__(self, num_slots: int, max_model_len: int = 1024):
        check_int("max_model_len", max_model_len)
        super().__init__(num_slots)
        self.memory, self.max_model_len = FirstFit(num_slots), max_model_len
        self.start: dict[Request, int] = {}
        self.moved_tokens = self.failures = self.gap_failures = 0
        self.most_free_at_failure = 0.0

    def room(self, tokens: int) -> int:
        raise NotImplementedError(f"{type(self).__name__} must say how long a range for {tokens} tokens is")

    def fits(self, tokens: int) -> bool:
        return tokens <= self.max_model_len and self.room(tokens) <= self.num_slots

    def grow(self, request: Request, tokens: int) -> bool:
        old = self.start.get(request)
        has = 0 if old is None else self.memory.held[old]
        if tokens <= has:
            return True
        if not self.fits(tokens):
            return False
        want = self.room(tokens)
        if old is not None and self.memory.extend(old, want):
            self.take(request, old + has, want - has)
            return True
        new = self.memory.allocate(want)
        if new is None and len(self.start) == 1 and old is not None:  # alone: it may slide down over its own range
            self.memory.release(old)
            new = self.memory.allocate(want)
        elif new is None:
            self._failed(want)
            return False
        elif old is not None:
            self.memory.release(old)
        if old is not None:
            self.moved_tokens += request.num_computed_tokens
            super().release(request)
            self.trace.note("copied", request, old, new)
        self.start[request] = new
        self.take(request, new, want)
        return True

    def release(self, request: Request) -> None:
        if request in self.start:
            self.memory.release(self.start.pop(request))
            super().release(request)

    def _failed(self, want: int) -> None:
        self.failures += 1
        if self.memory.free >= want:
            self.gap_failures += 1
            self.most_free_at_failure = max(self.most_free_at_failure, self.memory.free / self.num_slots)

    @property
    def slots_used(self) -> int:
        return self.num_slots - self.memory.free

    def free_runs(self) -> list[Piece]:
        return list(self.memory.gaps)

    @property
    def external_fragmentation(self) -> float:
        return self.memory.fragmentation


class ReservedAllocator(ContiguousAllocator):
    """max_model_len slots for every request from its first token on, since nobody knows how long it will run."""

    def room(self, tokens: int) -> int:
        return self.max_model_len


class DoublingAllocator(ContiguousAllocator):
    """The next power of two slots, at most max_model_len; twice as many when they are full."""

    def room(self, tokens: int) -> int:
        return min(1 << (tokens - 1).bit_length(), self.max_model_len)
