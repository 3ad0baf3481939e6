"""What must hold after every step of an engine or a scheduler on a paged allocator, and what its trace must say."""

from __future__ import annotations

import torch

from kvlab.caches import make_cache
from kvlab.generation import Sampler
from kvlab.serving import PagedAllocator, Scheduler, Status


def check_books(scheduler: Scheduler) -> None:
    """Blocks, queues and counts agree; nothing is leaked and nobody is in two places."""
    allocator: PagedAllocator = scheduler.allocator
    running, waiting = scheduler.running, list(scheduler.waiting)
    allocator.pool.check([row.table for row in allocator.rows.values()])
    assert set(allocator.rows) == set(running), "those who run hold blocks, and nobody else does"
    ages = [(r.order, r.index) for r in running + waiting]
    assert len(set(ages)) == len(ages) and ages == sorted(ages), "in order of arrival, nobody twice"
    to_fork = [s for r in running + waiting for s in r.to_fork]
    live = [r for r in scheduler.requests.values() if not r.finished]
    assert {*running, *waiting, *to_fork} == set(live) and len(running) + len(waiting) + len(to_fork) == len(live)
    assert len(running) + sum(len(r.to_fork) for r in running) <= scheduler.max_num_seqs
    for r in running:
        row = allocator.rows[r]
        assert r.status is Status.RUNNING and row.length == r.num_computed_tokens < r.num_tokens
        assert len(row.keys) <= row.length // allocator.pool.block_size, "only full blocks are registered"
        assert len(row.table) == -(-row.length // allocator.pool.block_size)
        assert allocator.pieces(r) == [(b * allocator.pool.block_size, allocator.pool.block_size) for b in row.table]
    for r in waiting + to_fork:
        assert r.status in (Status.WAITING, Status.PREEMPTED) and r.num_computed_tokens == 0
    assert scheduler.num_finished == len(scheduler.requests) - len(live)
    for r in scheduler.requests.values():
        assert r.ids[: len(r.prompt)] == r.prompt and len(r.output) <= r.max_tokens
        assert r.finished == (r.finished_step is not None) == bool(r.reason)


def check_empty(scheduler: Scheduler) -> None:
    """All requests have ended and all blocks are back."""
    assert not scheduler.unfinished and all(r.finished for r in scheduler.requests.values())
    pool = scheduler.allocator.pool
    assert pool.used_blocks == 0 and set(pool.ref) == {0} and len(pool.free) == pool.num_blocks
    pool.check([])


class Watch:
    """Looks at a scheduler at the end of each step's forward passes, and then holds its trace against what it saw."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler, self.seen, end_step = scheduler, [], scheduler.end_step

        def look_and_end():
            self.seen.append(self.look())
            end_step()

        scheduler.end_step = look_and_end

    def look(self):
        s = self.scheduler
        given = [r for r, _ in s._given]  # new tokens are appended already; the trace counts them from the next step on
        live = [*s.running, *s.waiting, *(x for r in (*s.running, *s.waiting) for x in r.to_fork)]
        return {
            r.id: (
                str(r.status),
                r.num_tokens - given.count(r),
                r.num_computed_tokens,
                s.allocator.pieces(r),
            )
            for r in live
        }

    def check(self) -> None:
        s, trace = self.scheduler, self.scheduler.trace
        assert trace.step == len(self.seen) > 0
        series, held = trace.series(), trace.held()
        for state, seen in zip(trace.replay(), self.seen):
            assert rebuilt(state) == seen, f"step {state.step}"
            assert series["running"][state.step] == len(state.running)
            assert series["waiting"][state.step] == len(state.waiting)
            pieces = {p for *_, held_pieces in seen.values() for p in held_pieces}
            assert series["slots"][state.step] == sum(n for _, n in pieces)
            assert series["tokens"][state.step] == sum(computed for _, _, computed, _ in seen.values())
            now = {(h.request, h.start) for h in held if h.begin <= state.step < h.end}
            assert now == {(id, start) for id, (*_, mine) in seen.items() for start, _ in mine}
        for step in {0, trace.step // 2, trace.step - 1}:
            assert rebuilt(trace.state_at(step)) == self.seen[step]
        lost = sum(r.num_lost_tokens for r in s.requests.values())
        assert series["given"].sum() == sum(len(r.output) for r in s.requests.values())
        assert lost == sum(e.a for e in trace.events if e.kind == "preempted")


def rebuilt(state):
    return {
        r.id: (r.status, r.num_tokens(state.step), r.num_computed_tokens(state.step), r.pieces)
        for r in state.requests.values()
    }


def alone(model, request, step_by_step: bool) -> tuple[list[int], list[torch.Tensor]]:
    """What the request gets alone, with a full cache: its new tokens, and the logits (vocab,) of each.

    step_by_step: prefill and decode. Else in one pass over the text that it has: while the tokens agree, that is the
    text which it would see alone, and when they part, the tokens say so.
    """
    cache = make_cache("full", model, 1, len(request.prompt) + request.max_tokens)
    sampler = Sampler(request.temperature, request.top_k, request.top_p, request.seed)

    def logits_of(ids):
        with torch.no_grad():
            return model(torch.tensor([ids]), cache)[0]

    ahead = [] if step_by_step else list(logits_of(request.ids)[len(request.prompt) - 1 :])
    feed, tokens, logits = request.prompt, [], []
    while step_by_step or len(tokens) < len(request.output):
        logits.append(logits_of(feed)[-1] if step_by_step else ahead[len(tokens)])
        tokens += sampler(logits[-1][None], [request.index])
        if tokens[-1] in request.stops or len(tokens) == request.max_tokens:
            break
        feed = tokens[-1:]
    return tokens, logits


def record_logits(engine) -> dict:
    """From now on, the logits that each token of each request is chosen from."""
    logits, choose = {}, engine.choose

    def choose_and_record(requests, rows):
        for request, row in zip(requests, rows):
            logits.setdefault(request, []).append(row)
        return choose(requests, rows)

    engine.choose = choose_and_record
    return logits


def check_alone(model, request, logits: list[torch.Tensor], step_by_step: bool = True) -> None:
    """Logits of every token within 1e-12 of those it gets alone; then its tokens equal, and their number, if the
    request was not cut short."""
    tokens, want = alone(model, request, step_by_step)
    n = len(request.output)
    for i in range(n):
        error = (logits[i] - want[i]).abs().max().item()
        assert error <= 1e-12, f"request {request.id!r}, token {i}: logits off by {error:.3g}"
    assert request.output == tokens[:n]
    if request.status in (Status.STOPPED, Status.LENGTH):
        assert n == len(tokens) and (tokens[-1] in request.stops or n == request.max_tokens)
