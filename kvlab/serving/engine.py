"""The engine: the scheduler's plan, computed by a model on one pool of blocks, and a token for each who is ready."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import torch
from torch import Tensor

from kvlab.caches.paged import PagedCache
from kvlab.caches.pool import BlockPool, pool_for
from kvlab.config import check_int
from kvlab.generation import Sampler, check_prompts, stop_sets
from kvlab.serving.allocator import PagedAllocator
from kvlab.serving.request import Request, Status
from kvlab.serving.scheduler import Scheduler


class Engine:
    """Many requests on one model and one pool (vLLM, arXiv 2309.06180; nano-vllm tells it in few pages).

    num_blocks, block_size: the pool, in tokens a block; or pool: a BlockPool that is there already, with its contents,
    and of which nobody else holds a block.
    max_num_batched_tokens, max_num_seqs: see Scheduler. prefix_sharing, headroom: see PagedAllocator.
    What happened stands in engine.trace; seconds, bytes_copied and bytes_read are summed over all steps (see KVCache).

    A step runs one forward pass for all decodes, and one for all chunks of equal length. Nothing is padded, so that a
    pass computes its requests' tokens and no others; in a single pass, padded to the longest chunk, every decode would
    cost as much as that chunk.
    """

    def __init__(
        self,
        model,
        num_blocks: int = 256,
        block_size: int = 16,
        *,
        pool: BlockPool | None = None,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int | None = None,
        prefix_sharing: bool = True,
        headroom: int = 1,
    ):
        self.model, self.pool = model, pool_for(pool, None if pool else num_blocks, block_size, 1, 1)
        self.allocator = PagedAllocator(self.pool, prefix_sharing, headroom)
        self.scheduler = Scheduler(self.allocator, max_num_batched_tokens, max_num_seqs)
        self.trace = self.scheduler.trace
        self.seconds = Counter(schedule=0.0, model=0.0, sample=0.0)  # schedule: the scheduler, the trace, callbacks
        self.bytes_gathered = self.bytes_read = 0

    def add(self, prompt: Request | list[int], max_tokens: int = 16, id: int | str | None = None, **options) -> Request:
        """Queue a prompt with the options of a Request, or a Request as it is. It joins at the next step with room.

        Raises ValueError or TypeError, with nothing changed, for ids outside the vocabulary, sampling options out of
        range, and what Request and Scheduler.check() refuse.
        """
        made = isinstance(prompt, Request)
        if made and (options or id is not None):
            raise ValueError(f"options beside a Request, which has its own: {', '.join(options) or 'id'}")
        request = prompt if made else Request(prompt, max_tokens, id, **options)
        self.scheduler.check(request)
        check_prompts([request.prompt], self.model.config.vocab_size)
        stops = stop_sets(request.stop_ids, 1, self.model.config)[0]
        sampler = Sampler(request.temperature, request.top_k, request.top_p, request.seed)
        request.stops, request.sampler = frozenset(stops), sampler
        return self.scheduler.add(request)

    def cancel(self, id: int | str) -> None:
        """See Scheduler.cancel(). A callback may call it."""
        self.scheduler.cancel(id)

    @property
    def unfinished(self) -> bool:
        return self.scheduler.unfinished

    @property
    def bytes_copied(self) -> int:
        """Gathered by attention, and copied on write."""
        return self.bytes_gathered + self.allocator.bytes_copied

    def run(self, max_steps: int | None = None) -> None:
        """Steps until all requests have ended, or max_steps of them."""
        if max_steps is not None:
            check_int("max_steps", max_steps)
        steps = 0
        while self.unfinished and (max_steps is None or steps < max_steps):
            self.step()
            steps += 1

    @torch.no_grad()
    def step(self) -> list[tuple[Request, int]]:
        """One step of the scheduler -> the new tokens, in the order in which they were made.

        If the model raises, the error passes through; what was not computed is planned again in the next step.
        """
        start = perf_counter()
        plan = self.scheduler.schedule()
        self.seconds["schedule"] += perf_counter() - start
        new: list[tuple[Request, int]] = []
        try:
            groups: dict[int, list[Request]] = {}  # tokens to compute -> who
            for request, n in plan:
                groups.setdefault(n, []).append(request)
            for n, requests in sorted(groups.items()):
                new += self._compute(requests, n)
        finally:
            start = perf_counter()
            self.scheduler.end_step()
            self.seconds["schedule"] += perf_counter() - start
        return new

    def _compute(self, requests: list[Request], n: int) -> list[tuple[Request, int]]:
        """The next n tokens of these requests in one forward pass -> the new tokens it gives.

        Nothing counts before the tokens are chosen: who was interrupted until then is planned again.
        """
        times = [perf_counter()]
        logits = self._forward(requests, n)  # (B, vocab)
        times.append(perf_counter())
        ready = [(r, row) for row, request in enumerate(requests) for r in self.scheduler.ready(request)]
        times.append(perf_counter())
        chosen = self.choose([r for r, _ in ready], logits[[row for _, row in ready]]) if ready else []
        times.append(perf_counter())
        new, tokens = [], iter(chosen)
        for request in requests:
            for r in self.scheduler.computed(request):
                if isinstance(token := next(tokens), Exception):
                    self.scheduler.finish(r, Status.FAILED, f"sampling raised {type(token).__name__}: {token}")
                else:
                    self.scheduler.append(r, token)
                    new.append((r, token))
        times.append(perf_counter())
        for name, start, end in zip(("model", "schedule", "sample", "schedule"), times, times[1:]):
            self.seconds[name] += end - start
        return new

    def _forward(self, requests: list[Request], n: int) -> Tensor:
        """Logits (B, vocab) after the last of the next n tokens of each request."""
        starts = [r.num_computed_tokens for r in requests]
        ids = torch.tensor([r.ids[s : s + n] for r, s in zip(requests, starts)], device=self.model.device)
        cache = PagedCache.over([self.allocator.rows[r] for r in requests])
        logits = self.model(ids, cache, logits_to_keep=1)
        self.bytes_gathered += cache.bytes_copied
        self.bytes_read += cache.bytes_read
        return logits[:, -1]

    def choose(self, requests: list[Request], logits: Tensor) -> list[int | Exception]:
        """A token for each request from its row of logits (B, vocab), or what its sampling raised."""
        tokens: list[int | Exception] = logits.argmax(-1).tolist()
        for i, request in enumerate(requests):
            if request.sampler.temperature == 0:
                continue
            try:
                tokens[i] = request.sampler(logits[i : i + 1], [request.index])[0]
            except Exception as error:
                tokens[i] = error
        return tokens
