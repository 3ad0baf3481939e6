"""Bugs planted into the scheduler, the allocator and the engine: the random workloads must find each of them."""

import pytest
import torch
from random_workloads import run_workload

from kvlab.caches import BlockPool
from kvlab.caches.row import Row
from kvlab.generation import Sampler
from kvlab.serving import Engine, PagedAllocator, Scheduler

preempt, ready, release, finish = Scheduler._preempt, Scheduler.ready, PagedAllocator.release, Scheduler.finish
adopt, deliver = Row.adopt, Scheduler._deliver_one


def forgets_what_it_said(self, request):
    preempt(self, request)
    del request.ids[len(request.prompt) :]


def begins_its_text_again(self, request):
    preempt(self, request)
    sampler = request.sampler
    request.sampler = Sampler(sampler.temperature, sampler.top_k, sampler.top_p, sampler.seed)


def recomputes_the_prompt_alone(self, request):
    """The tokens that it had generated are taken for computed: nano-vllm #211."""
    preempt(self, request)
    request.num_computed_tokens = len(request.output)


def loses_its_place(self, request):
    preempt(self, request)
    self.waiting.remove(request)
    self.waiting.append(request)


def keeps_its_blocks(self, request):
    if request.num_preemptions % 2:
        release(self, request)
    else:
        self.rows.pop(request, None)


def gives_a_token_in_the_middle_of_a_prompt(self, request):
    return ready(self, request) or [request]


def whole_text(self, ids, find=BlockPool.find):
    return find(self, [*ids, 0])


def registered_before_it_is_full(self, ids):
    bs = self.pool.block_size
    for i in range(len(self.keys), -(-self.length // bs)):
        self.keys.append(self.pool.chain(self.keys[-1] if i else b"", ids[i * bs : (i + 1) * bs]))
        self.pool.register(self.table[i], self.keys[-1])


def without_its_parent(before, ids, chain=BlockPool.chain):
    return chain(b"", ids)


def positions_from_zero(self, blocks, keys):
    """MinivLLM #98: the tail after a hit starts again at position 0."""
    n = adopt(self, blocks, keys)
    self.length = 0
    return n


def one_generator_for_all(self, row, device, generator=Sampler._generator):
    return generator(self, 0, device)


def wrong_rows(self, requests, n, forward=Engine._forward):
    return forward(self, requests, n).roll(1, 0)


def ids_of_the_prompt_alone(self, requests, n):
    from kvlab.caches import PagedCache

    cache = PagedCache.over([self.allocator.rows[r] for r in requests])
    ids = [[(r.prompt * 99)[r.num_computed_tokens + i] for i in range(n)] for r in requests]
    return self.model(torch.tensor(ids), cache, logits_to_keep=1)[:, -1]


def one_too_many(self, request, token):
    request.max_tokens += 1
    deliver(self, request, token)
    request.max_tokens -= 1


def leaves_others_running(self, request, status, reason):
    request.to_fork.clear()
    finish(self, request, status, reason)


def fork_without_sharing(self, parent, child):
    self.rows[child] = Row(self.pool, self.rows[parent].length, list(self.rows[parent].table))


BUGS = {
    "a preempted request forgets its output": (Scheduler, "_preempt", forgets_what_it_said),
    "a preempted request draws from the beginning": (Scheduler, "_preempt", begins_its_text_again),
    "a preempted request recomputes only its prompt": (Scheduler, "_preempt", recomputes_the_prompt_alone),
    "a preempted request goes to the end of the queue": (Scheduler, "_preempt", loses_its_place),
    "blocks leak": (PagedAllocator, "release", keeps_its_blocks),
    "a token in the middle of a prompt": (Scheduler, "ready", gives_a_token_in_the_middle_of_a_prompt),
    "a full prefix hit": (BlockPool, "find", whole_text),
    "registered before it is full": (Row, "commit", registered_before_it_is_full),
    "prefix hash without its parent": (BlockPool, "chain", staticmethod(without_its_parent)),
    "positions from zero after a hit": (Row, "adopt", positions_from_zero),
    "copy on write forgotten": (Row, "shared_tail", lambda self: None),
    "samples share one generator": (Sampler, "_generator", one_generator_for_all),
    "logits of another row": (Engine, "_forward", wrong_rows),
    "generated tokens are not fed back": (Engine, "_forward", ids_of_the_prompt_alone),
    "one token too many": (Scheduler, "_deliver_one", one_too_many),
    "samples are lost with their request": (Scheduler, "finish", leaves_others_running),
    "a fork takes no reference": (PagedAllocator, "fork", fork_without_sharing),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    target, name, planted = BUGS[bug]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, KeyError)):
        for seed in range(20):
            run_workload(seed, step_by_step=False)
