"""The same requests in the same memory, kept in different ways: how many run at once, and what stands empty.

All but the padded batch run under the same scheduler; only the allocator differs. No model is needed: a request is
known by its lengths, and time is counted in model steps, or in the FLOPs and bytes that they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlab.caches.pool import BlockPool
from kvlab.config import check_int
from kvlab.serving.allocator import Allocator, PagedAllocator
from kvlab.serving.contiguous import DoublingAllocator, ReservedAllocator
from kvlab.serving.figures import Figures
from kvlab.serving.padded import padded_batches
from kvlab.serving.request import Status
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.simulation import Simulation, check_lengths
from kvlab.workloads import Arrival

BLOCK_SIZES = (1, 8, 16, 64, 256)
RIVALS = {
    "padded": "static batches, rows padded to the longest",
    "packed": "static batches without padding",
    "reserved": "max_model_len slots for each request",
    "doubling": "a power of two slots, doubled when full, first fit",
    **{f"paged-{n}": f"blocks of {n} token{'s' if n > 1 else ''}" for n in BLOCK_SIZES},
}
VOCAB = 32_000  # of the made-up prompts, where prefixes are shared


def allocator_for(
    name: str, num_slots: int, max_model_len: int = 1024, prefix_sharing: bool = False, headroom: int = 0
) -> Allocator:
    """The allocator of a rival by its name: "packed", "reserved", "doubling" or "paged-N" for blocks of N tokens."""
    check_int("num_slots", num_slots)
    if name == "reserved":
        return ReservedAllocator(num_slots, max_model_len)
    if name == "doubling":
        return DoublingAllocator(num_slots, max_model_len)
    if name == "packed":
        block_size, prefix_sharing = 1, False
    else:
        block_size = _block_size(name)
    if num_slots < block_size:
        raise ValueError(f"{name}: {num_slots} slots are less than one block: take smaller blocks, or more memory")
    return PagedAllocator(BlockPool(num_slots // block_size, block_size), prefix_sharing, headroom)


def scheduler_for(name: str, allocator: Allocator, max_num_batched_tokens: int = 256) -> Scheduler:
    """The scheduler, the same for all. The packed batch is static, and computes its prompts in one step: it takes as
    many requests as have room then, and none before the last of them has ended. A request's slots are free when it
    ends, for those of its batch that still grow."""
    if name == "packed":
        return Scheduler(allocator, max(allocator.num_slots, max_num_batched_tokens), continuous=False)
    return Scheduler(allocator, max_num_batched_tokens)


def simulate(
    name: str,
    arrivals: Sequence[Arrival],
    num_slots: int,
    *,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 256,
    prefix_sharing: bool = False,
    headroom: int = 0,
    on_finished: Callable[[int], object] | None = None,
) -> Figures:
    """Serve `arrivals` without a model in num_slots slots -> Figures.

    name: of RIVALS, or "paged-N". prefix_sharing: the paged rivals share full blocks of equal prompts' beginnings.
    headroom: blocks that an admission must leave free, paged and packed. on_finished(n): n more requests have ended.
    Raises ValueError for an unknown name, and for a request longer than max_model_len.
    """
    check_int("num_slots", num_slots)
    check_int("max_num_batched_tokens", max_num_batched_tokens)
    check_lengths(arrivals, max_model_len)
    told = on_finished or (lambda n: None)
    if name == "padded":
        return _padded(arrivals, num_slots, max_model_len, max_num_batched_tokens, told)
    allocator = allocator_for(name, num_slots, max_model_len, prefix_sharing, headroom)
    scheduler = scheduler_for(name, allocator, max_num_batched_tokens)
    run = Simulation(scheduler, arrivals, VOCAB if prefix_sharing else None, keep_trace=False)
    found, ended = Figures(name, num_slots, requests=len(arrivals)), 0
    for plan in run:
        _count(found, plan, scheduler)
        if scheduler.num_finished > ended:
            told(scheduler.num_finished - ended)
            ended = scheduler.num_finished
    told(len(arrivals) - ended)
    requests = scheduler.requests.values()
    served = [r for r in requests if r.status is Status.LENGTH]
    found.steps, found.finished = run.feed.clock, len(served)
    found.waited = sum(r.first_token_step - r.added_step for r in served)
    found.emitted = sum(r.num_tokens - len(r.prompt) for r in requests)
    found.preemptions = scheduler.num_preemptions
    found.recomputed = sum(r.num_lost_tokens for r in requests)
    found.cached = sum(r.num_cached_tokens for r in requests)
    for counter in ("moved_tokens", "failures", "gap_failures", "most_free_at_failure"):
        setattr(found, counter, getattr(allocator, counter, 0))
    return found


def check_names(names: Sequence[str], num_slots: int) -> None:
    """Raises ValueError for an unknown rival, or one whose block has no room: better said before the first has run."""
    for name in names:
        if name != "padded":
            allocator_for(name, num_slots)


def compare(
    arrivals: Sequence[Arrival], num_slots: int, names: Sequence[str] = tuple(RIVALS), **options
) -> list[Figures]:
    """simulate() for each of the rivals; options are its own."""
    check_names(names, num_slots)
    return [simulate(name, arrivals, num_slots, **options) for name in names]


def _count(found: Figures, plan, scheduler: Scheduler) -> None:
    """One step of the scheduler, its tokens in their slots."""
    running, allocator = scheduler.running, scheduler.allocator
    found.model_steps += 1
    found.peak_requests = max(found.peak_requests, len(running))
    found.request_steps += len(running)
    found.token_steps += sum(r.num_computed_tokens for r in running)
    found.slot_steps += allocator.slots_used
    found.free_steps += allocator.slots_free
    found.stranded_steps += round(allocator.slots_free * allocator.external_fragmentation)
    found.logit_rows += len(plan)
    passes: dict[int, list[int]] = {}  # as the engine: those with n tokens to compute go in one pass
    for request, n in plan:
        found.computed += n
        found.read += request.num_computed_tokens
        passes.setdefault(n, []).append(request.num_computed_tokens)
    found.pairs += sum(n * len(seen) * max(seen) for n, seen in passes.items())  # as wide as the longest


def _padded(arrivals, num_slots, max_model_len, token_budget, told) -> Figures:
    found = Figures("padded", num_slots, requests=len(arrivals))
    for s in padded_batches(arrivals, num_slots, max_model_len, token_budget):
        found.steps = s.step + 1
        found.model_steps += 1
        found.peak_requests = max(found.peak_requests, s.live)
        found.request_steps += s.live
        found.token_steps += s.tokens
        found.slot_steps += s.slots
        found.free_steps += num_slots - s.slots
        found.logit_rows += s.rows
        found.computed += s.computed
        found.read += s.slots  # padding is read, and then masked
        found.pairs += s.computed * s.slots // s.rows
        found.emitted += s.emitted
        found.finished += s.ended
        found.waited += s.waited
        told(s.ended)
    return found


def _block_size(name: str) -> int:
    kind, _, size = name.partition("-") if isinstance(name, str) else ("", "", "")
    if kind != "paged" or not size.isdecimal() or int(size) < 1:
        raise ValueError(f"rival {name!r} is not known; rivals are {', '.join(RIVALS)}, and paged-N for any N")
    return int(size)
