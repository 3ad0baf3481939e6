"""The scheduler: who runs, how many tokens, on whose slots. It decides; it computes nothing and holds no tensor.

A step is    for request, n in schedule(): compute the n tokens after its num_computed_tokens;
             for r in computed(request): append(r, its next token);
             end_step()
Requests join and leave between steps (continuous batching, Orca, OSDI 2022); a long prompt is computed in chunks beside
the others' decode steps (Sarathi-Serve, arXiv 2403.02310); when no slot is left, the newest request gives up its own
and is computed anew later (vLLM, arXiv 2309.06180).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from itertools import count

from kvlab.config import check_int
from kvlab.serving.allocator import Allocator
from kvlab.serving.request import Request, Status
from kvlab.serving.trace import Trace


def age(request: Request) -> tuple[int, int]:
    """Smaller is older: order of arrival, then which sample of its prompt."""
    return request.order, request.index


class Scheduler:
    """First come, first served, over any Allocator.

    max_num_batched_tokens: tokens computed in one step at most; every decode has its one, prompts share the rest.
    max_num_seqs: requests that run at once at most (each sample counts), no more than max_num_batched_tokens.
    continuous: False makes a static batch: nobody joins before all who run have finished.
    waiting and running are both in order of arrival, and all of running is older than all of waiting.
    """

    def __init__(
        self,
        allocator: Allocator,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int | None = None,
        continuous: bool = True,
    ):
        check_int("max_num_batched_tokens", max_num_batched_tokens)
        max_num_seqs = max_num_batched_tokens if max_num_seqs is None else max_num_seqs
        check_int("max_num_seqs", max_num_seqs)
        if max_num_seqs > max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={max_num_seqs} requests decode one token each, max_num_batched_tokens="
                f"{max_num_batched_tokens} allows fewer: lower the one or raise the other"
            )
        self.allocator, self.continuous = allocator, continuous
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        pool = getattr(allocator, "pool", None)
        self.trace = allocator.trace = Trace(allocator.num_slots, pool.block_size if pool else None)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[int | str, Request] = {}  # every one that was ever added
        self._blocked = False  # the head of the queue found no room, and nothing was released since
        self._todo: dict[Request, int] = {}  # the step's plan: who is still to compute how many tokens
        self._given: deque[tuple[Request, int]] = deque()  # new tokens whose callbacks and ends are still to come
        self._delivering = False
        self.num_preemptions = self.num_finished = 0

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """Raises ValueError for an id that was used before, a request that was added before, and more samples than
        may run at once. Changes nothing."""
        if not isinstance(request, Request):
            raise TypeError(f"{request!r} must be a Request")
        if request.status is not Status.NEW:
            raise ValueError(f"request {request.id!r} was added before (it is {request.status}): make a new one")
        if request.n > self.max_num_seqs:
            raise ValueError(f"n={request.n} samples cannot run together: max_num_seqs={self.max_num_seqs}")
        id = self._id_of(request)
        for name in (id, *(f"{id}/{i}" for i in range(1, request.n))):
            if name in self.requests:
                raise ValueError(f"request id {name!r} is in use already ({self.requests[name].status})")

    def _id_of(self, request: Request) -> int | str:
        if request.id is not None:
            return request.id
        return next(i for i in count(len(self.requests)) if i not in self.requests)

    def add(self, request: Request) -> Request:
        """Put a request at the end of the queue, or raise as check() does, with nothing changed.
        One that can never fit ends at once (Status.TOO_LONG)."""
        self.check(request)
        request.id, request.order = self._id_of(request), len(self.requests)
        request.samples += [request.sample(i) for i in range(1, request.n)]
        for sample in request.samples:
            sample.status, sample.added_step = Status.WAITING, self.trace.step
            self.requests[sample.id] = sample
            self.trace.note("added", sample, sample.num_tokens, sample.max_tokens)
        if self.allocator.offers_fork:
            request.to_fork = request.samples[1:]
        self.waiting += [request] if request.to_fork else request.samples
        if not self.allocator.fits(request.num_tokens):
            for sample in request.samples:
                if not sample.finished:  # those to fork have ended with their request
                    self._end_too_long(sample)
        return request

    def cancel(self, id: int | str) -> None:
        """End a request, and those of its samples that wait for its prompt. One that has ended stays as it is.
        Raises KeyError for an id that nobody has, RuntimeError in the middle of a step (a callback is not)."""
        if id not in self.requests:
            raise KeyError(f"no request has the id {id!r}")
        if self._todo:
            raise RuntimeError("a step is running: cancel between two steps, or in a callback")
        if not self.requests[id].finished:
            self.finish(self.requests[id], Status.CANCELLED, "cancelled")

    def finish(self, request: Request, status: Status, reason: str) -> None:
        """Take a request out, wherever it is, with all that it holds."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request in (parent := request.samples[0]).to_fork:
            parent.to_fork.remove(request)
        else:
            self.waiting.remove(request)
        self.allocator.release(request)
        self._blocked = False
        self.num_finished += 1
        request.status, request.reason, request.finished_step = status, reason, self.trace.step
        self.trace.stop("finished", request, str(status))
        for sample in [*request.to_fork]:
            self.finish(sample, status, reason)

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._given)

    # ---- one step

    def schedule(self) -> list[tuple[Request, int]]:
        """Begin a step -> (request, n) in order of arrival: compute its next n tokens, for which it now has slots."""
        if self._todo or self._delivering:
            raise RuntimeError("a step is running already: end_step() ends it (a callback must not start one)")
        self._deliver()  # what a callback that was interrupted has left
        may_join, preemptions = self.continuous or not self.running, self.num_preemptions
        budget = self.max_num_batched_tokens - sum(r.num_tokens - r.num_computed_tokens == 1 for r in self.running)
        i = 0
        while i < len(self.running):
            request = self.running[i]
            left = request.num_tokens - request.num_computed_tokens
            n = 1 if left == 1 else min(left, budget)
            if n == 0:
                self.trace.run(request, 0, 0)  # keeps what it holds, and waits for a step with tokens to spare
            elif not self._make_room(request, request.num_computed_tokens + n):
                continue  # it left; running[i] is another now, or nobody
            else:
                self._todo[request] = n
                budget -= n if left > 1 else 0
            i += 1
        if may_join and self.num_preemptions == preemptions:
            self._admit(budget)
        return list(self._todo.items())

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Slots for that many tokens of a running request; the newest ones make way. False: it had to leave itself."""
        while not self.allocator.grow(request, tokens):
            if len(self.running) == 1:  # nobody else holds anything
                self._end_too_long(request)
                return False
            newest = self.running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue, with its tokens and without its slots."""
        self.running.remove(request)
        self.allocator.release(request)
        self._blocked = False
        self.trace.stop("preempted", request, request.num_computed_tokens)
        request.num_lost_tokens += request.num_computed_tokens
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.status, request.num_computed_tokens = Status.PREEMPTED, 0
        self.waiting.appendleft(request)

    def _admit(self, budget: int) -> None:
        """Let requests join from the head of the queue while there are tokens, seats and slots. Nobody overtakes."""
        seats = self.max_num_seqs - sum(1 + len(r.to_fork) for r in self.running)
        while self.waiting and budget > 0 and not self._blocked:
            request = self.waiting[0]
            wants = 1 + len(request.to_fork)
            if wants > seats:
                return
            found = self.allocator.admit(request)
            if found is None and self.running:
                self._blocked = True  # until something is released
                return
            if found is None:
                self._end_too_long(request)
                continue
            seats -= wants
            self.waiting.popleft()
            self.running.append(request)
            request.status, request.num_computed_tokens = Status.RUNNING, found
            request.num_cached_tokens += found
            self.trace.note("admitted", request, found)
            n = min(request.num_tokens - found, budget)
            if not self.allocator.grow(request, found + n):
                raise RuntimeError(
                    f"{type(self.allocator).__name__} admitted request {request.id!r} without room for it"
                )
            self._todo[request] = n
            budget -= n

    def ready(self, request: Request) -> list[Request]:
        """Who may be given a token from the logits after the last of the tokens planned for this request: nobody in the
        middle of a prompt; itself; and the samples that computed() forks from it. Changes nothing."""
        if request.num_computed_tokens + self._todo[request] < request.num_tokens:
            return []
        return [request, *request.to_fork]

    def computed(self, request: Request) -> list[Request]:
        """The tokens planned for this request are in its slots now -> those who are ready(): append() gives them
        theirs."""
        ready, n = self.ready(request), self._todo.pop(request)
        request.num_computed_tokens += n
        self.allocator.wrote(request)
        self.trace.run(request, n, min(1, len(ready)))
        for sample in ready[1:]:
            request.to_fork.remove(sample)
            self.allocator.fork(request, sample)
            sample.status, sample.num_computed_tokens = Status.RUNNING, request.num_computed_tokens
            self.trace.fork(request, sample)
            insort(self.running, sample, key=age)
        return ready

    def append(self, request: Request, token: int) -> None:
        """Its next token. Callbacks and ends follow in end_step()."""
        if request.first_token_step is None:
            request.first_token_step = self.trace.step
        request.ids.append(token)
        self._given.append((request, token))

    def end_step(self) -> None:
        """The step is over. Who was planned and not computed, because a layer raised, is so again in the next one."""
        for request in self._todo:
            self.trace.run(request, 0, 0)
        self.trace.step += 1
        for request in self._todo:
            self.allocator.trim(request)
        self._todo.clear()
        self._deliver()

    def _deliver(self) -> None:
        """Call back for each new token, and end the requests that are complete."""
        self._delivering = True
        try:
            while self._given:
                request, token = self._given.popleft()
                if not request.finished:  # another's callback may have cancelled it
                    self._deliver_one(request, token)
        finally:
            self._delivering = False

    def _deliver_one(self, request: Request, token: int) -> None:
        end = None
        if token in request.stops:
            end = Status.STOPPED, f"stop id {token} came"
        elif request.num_tokens == len(request.prompt) + request.max_tokens:
            end = Status.LENGTH, f"max_tokens={request.max_tokens} came"
        try:
            if request.on_token is not None:
                request.on_token(request, token)
        except Exception as error:
            end = Status.FAILED, f"on_token raised {type(error).__name__}: {error}"
        finally:  # an interrupt passes through, and the books stay right
            if end and not request.finished:
                self.finish(request, *end)

    def _end_too_long(self, request: Request) -> None:
        slots = self.allocator.num_slots
        self.finish(request, Status.TOO_LONG, f"its {request.num_tokens} tokens do not fit in {slots} slots")
