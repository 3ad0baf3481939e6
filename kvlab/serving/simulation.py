"""A workload served without a model: the scheduler's steps, and a made-up token wherever a model would give one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import ceil

from kvlab.config import check_int
from kvlab.serving.request import Request
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.trace import Trace
from kvlab.workloads import Arrival, prompt_ids


def check_lengths(arrivals: Sequence[Arrival], max_model_len: int) -> None:
    """Raises ValueError for a request longer than max_model_len, prompt and output together."""
    check_int("max_model_len", max_model_len)
    if long := [a for a in arrivals if a.total_tokens > max_model_len]:
        raise ValueError(f"request {long[0].id} has {long[0].total_tokens} tokens, more than {max_model_len=}")


class Feed:
    """Adds a workload's requests to a scheduler or an engine when they are due.

    vocab_size: make token ids for the prompts; None: zeros, which is all that a simulation without sharing needs.
    clock: the target's steps, and those that passed while nobody was there.
    """

    def __init__(self, target, arrivals: Sequence[Arrival], vocab_size: int | None = None):
        self.target, self.vocab_size, self.idle = target, vocab_size, 0
        self.coming = deque(sorted(arrivals, key=lambda a: a.arrival))

    @property
    def clock(self) -> int:
        return self.target.trace.step + self.idle

    def add_due(self) -> bool:
        """Add who has arrived; if nobody else is there, the clock jumps to the next one. False: all is done."""
        if self.coming and not self.target.unfinished:
            self.idle += max(0, ceil(self.coming[0].arrival) - self.clock)
        while self.coming and self.coming[0].arrival <= self.clock:
            self.target.add(self._request(self.coming.popleft()))
        return self.target.unfinished or bool(self.coming)

    def _request(self, a: Arrival) -> Request:
        prompt = prompt_ids(a, self.vocab_size) if self.vocab_size else [0] * a.prompt_tokens
        return Request(prompt, a.output_tokens, a.id, stop_ids=[], arrival=a.arrival)


class Simulation:
    """Iterate over it: each turn is one model step, [(request, tokens computed)], seen when the tokens are in their
    slots and nobody has left yet.

    keep_trace: False forgets the events, of which ten thousand requests have millions; steps are counted all the same.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        arrivals: Sequence[Arrival],
        vocab_size: int | None = None,
        keep_trace: bool = True,
    ):
        self.scheduler, self.feed = scheduler, Feed(scheduler, arrivals, vocab_size)
        if not keep_trace:
            scheduler.trace = scheduler.allocator.trace = Forgetful(scheduler.allocator.num_slots)

    def __iter__(self) -> Iterator[list[tuple[Request, int]]]:
        while self.feed.add_due():
            plan = self.scheduler.schedule()
            for request, _ in plan:
                for ready in self.scheduler.computed(request):
                    self.scheduler.append(ready, 0)
            if plan:
                yield plan
            self.scheduler.end_step()


class Forgetful(Trace):
    """Counts steps and keeps no events."""

    def note(self, kind, request, a=None, b=None) -> None:
        pass
