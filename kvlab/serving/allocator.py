"""Where the tokens of requests are kept: what the scheduler asks of an allocator, and the paged answer.

The scheduler decides who runs and how many tokens; an allocator finds the slots. One slot holds one token, all layers.
Slots are numbered 0 .. num_slots - 1. Nothing here touches a tensor: a simulation needs no model.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.caches.pool import BlockPool
from kvlab.caches.row import Row
from kvlab.config import check_int
from kvlab.serving.request import Request
from kvlab.serving.trace import Trace

Piece = tuple[int, int]  # first slot, number of slots


class Allocator:
    """num_slots slots, of which requests hold contiguous pieces. Write `grow`; the rest has a plain version here.

    A subclass changes `held` through take() and give() alone, so that the trace sees every change.
    Counts are in tokens (= slots). `tokens` always means that many in all, not that many more.
    """

    offers_fork = False  # True: fork() works; else each sample of a prompt computes it by itself

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.trace: Trace | None = None  # set by the scheduler
        self.held: dict[Request, list[Piece]] = {}

    # ---- what the scheduler asks

    def fits(self, tokens: int) -> bool:
        """Could one request hold `tokens` tokens if it were alone? add() ends those that never can."""
        return tokens <= self.num_slots

    def admit(self, request: Request) -> int | None:
        """May this waiting request start now? None: no, nothing changed. Else the number of its first tokens that are
        in slots already (a shared prefix, which it now holds): 0 without sharing.

        Plain version: yes if room for all its tokens can be had at once; that room is taken.
        """
        return 0 if self.grow(request, request.num_tokens) else None

    def grow(self, request: Request, tokens: int) -> bool:
        """Make sure that the request has slots for `tokens` tokens. False, with nothing changed, if there is no room.
        The scheduler then preempts the newest request and asks again."""
        raise NotImplementedError(f"{type(self).__name__} must say how a request grows")

    def wrote(self, request: Request) -> None:
        """The slots of its first request.num_computed_tokens tokens are filled now."""

    def fork(self, parent: Request, child: Request) -> None:
        """Give the child what the parent holds; asked only of an allocator that offers it."""
        raise NotImplementedError(f"{type(self).__name__} does not offer fork")

    def trim(self, request: Request) -> None:
        """A step failed before request.num_computed_tokens grew: slots taken for its new tokens may be given back."""

    def release(self, request: Request) -> None:
        """Take back all that the request holds, if anything."""
        if self.held.pop(request, None) is not None:
            self.trace.release(request)

    # ---- for subclasses

    def take(self, request: Request, start: int, slots: int) -> None:
        """The request holds this piece from now on."""
        self.held.setdefault(request, []).append((start, slots))
        self.trace.take(request, start, slots)

    def give(self, request: Request, start: int, slots: int) -> None:
        """The request no longer holds this piece."""
        self.held[request].remove((start, slots))
        self.trace.give(request, start, slots)

    # ---- what pictures and tables ask

    def pieces(self, request: Request) -> list[Piece]:
        """What the request holds, in the order of its tokens."""
        return list(self.held.get(request, ()))

    def slots_held(self, request: Request) -> int:
        return sum(slots for _, slots in self.held.get(request, ()))

    @property
    def slots_used(self) -> int:
        """Slots held by anybody, each once."""
        return sum(slots for pieces in self.held.values() for _, slots in pieces)

    @property
    def slots_free(self) -> int:
        return self.num_slots - self.slots_used

    def free_runs(self) -> list[Piece]:
        """The gaps between the pieces, in order."""
        return gaps((piece for pieces in self.held.values() for piece in pieces), self.num_slots)

    @property
    def external_fragmentation(self) -> float:
        """The share of the free slots outside the largest free run: 0 if all of them could serve one request."""
        runs = [slots for _, slots in self.free_runs()]
        return 1 - max(runs) / sum(runs) if runs else 0.0


class PagedAllocator(Allocator):
    """Blocks from a BlockPool: any free block will do, so that a request waits for room and never for a gap.

    A request's block table is rows[request].table. A pool without storage (no forward pass has made any) costs nothing,
    so that simulations run on the same code as engines.
    prefix_sharing: full blocks are registered, and a request that begins with the same tokens takes them over.
    headroom: an admission must leave this many blocks free for each request that runs already and will soon need one:
    without it the newest one is preempted soon after, and what it has computed is lost.
    """

    offers_fork = True

    def __init__(self, pool: BlockPool, prefix_sharing: bool = True, headroom: int = 1):
        check_int("headroom", headroom, 0)
        super().__init__(pool.num_blocks * pool.block_size)
        self.pool, self.prefix_sharing, self.headroom = pool, prefix_sharing, headroom
        self.rows: dict[Request, Row] = {}
        self.bytes_copied = 0  # on write, by forks; 0 while the pool has no storage

    def admit(self, request: Request) -> int | None:
        blocks, keys = self.pool.find(request.ids) if self.prefix_sharing else ([], [])
        new = -(-request.num_tokens // self.pool.block_size) - len(blocks)
        free = len(self.pool.free) - sum(self.pool.ref[block] == 0 for block in blocks)
        if new > free - self.headroom * len(self.rows):
            return None
        self.rows[request] = row = Row(self.pool)
        self._note(request, [], blocks)
        return row.adopt(blocks, keys)

    def grow(self, request: Request, tokens: int) -> bool:
        row = self.rows.get(request) or self.rows.setdefault(request, Row(self.pool))
        if row.cost(tokens) > len(self.pool.free):
            return False
        new, copied = row.grow(tokens)
        if copied:
            i, old, nbytes = copied
            self.bytes_copied += nbytes
            self._note(request, [old], [row.table[i]])
            bs = self.pool.block_size
            self.trace.note("copied", request, old * bs, row.table[i] * bs)
        if new:
            self._note(request, [], row.table[-new:])
        return True

    def wrote(self, request: Request) -> None:
        row = self.rows[request]
        row.length = request.num_computed_tokens  # the forward pass, if there was one, has said so too
        if self.prefix_sharing and row.length >= (len(row.keys) + 1) * self.pool.block_size:
            row.commit(request.ids)

    def fork(self, parent: Request, child: Request) -> None:
        self.rows[child] = self.rows[parent].copy()
        self._note(child, [], self.rows[child].table)

    def trim(self, request: Request) -> None:
        row, bs = self.rows[request], self.pool.block_size
        row.length = request.num_computed_tokens  # the forward pass may have moved it on before the step failed
        blocks = -(-row.length // bs)
        self._note(request, row.table[blocks:], [])
        row.keep(blocks)

    def release(self, request: Request) -> None:
        if (row := self.rows.pop(request, None)) is not None:
            row.keep(0)
            self.trace.release(request)

    def _note(self, request: Request, gives: Iterable[int], takes: Iterable[int]) -> None:
        bs = self.pool.block_size
        for block in gives:
            self.trace.give(request, block * bs, bs)
        for block in takes:
            self.trace.take(request, block * bs, bs)

    # ---- what pictures and tables ask

    def pieces(self, request: Request) -> list[Piece]:
        row, bs = self.rows.get(request), self.pool.block_size
        return [(block * bs, bs) for block in row.table] if row else []

    def slots_held(self, request: Request) -> int:
        return len(self.rows[request].table) * self.pool.block_size if request in self.rows else 0

    @property
    def slots_used(self) -> int:
        return self.pool.used_blocks * self.pool.block_size

    def free_runs(self) -> list[Piece]:
        bs = self.pool.block_size
        return gaps(((b * bs, bs) for b, ref in enumerate(self.pool.ref) if ref), self.num_slots)

    @property
    def external_fragmentation(self) -> float:
        """0: any free block serves any request, wherever it lies."""
        return 0.0


def gaps(pieces: Iterable[Piece], num_slots: int) -> list[Piece]:
    """The free runs between pieces that do not overlap."""
    runs, end = [], 0
    for start, slots in [*sorted(pieces), (num_slots, 0)]:
        if start > end:
            runs.append((end, start - end))
        end = start + slots
    return runs
