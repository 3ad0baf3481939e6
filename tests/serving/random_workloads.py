"""Random workloads on small pools: prompts that share beginnings, samples, stops, cancels, callbacks that fail."""

from __future__ import annotations

from collections import Counter

import numpy as np
from books import Watch, check_alone, check_books, check_empty, record_logits
from oracles import ids_for, toy

from kvlab.serving import Engine, Request

MODELS = (
    {},
    {"num_key_value_heads": 1},
    {"sliding_window": 6, "layer_types": ("sliding_attention", "full_attention")},
)


def requests_for(rng) -> list[Request]:
    def pick(*choices):
        return choices[rng.integers(len(choices))]

    openings = ids_for(int(rng.integers(1000)), [4, 9, 16])
    openings[1][:3] = openings[0][:3]
    found = []
    for i in range(int(rng.integers(3, 9))):
        prompt = pick([], *openings) + rng.integers(0, 50, int(rng.integers(1, 8))).tolist()
        if found and rng.random() < 0.2:
            prompt = list(found[-1].prompt)  # the very same again
        options = {"temperature": pick(0.0, 0.7, 1.5), "seed": int(rng.integers(1000)), "n": pick(1, 1, 1, 2, 3)}
        options["top_k"], options["top_p"] = pick(None, 5), pick(None, 0.9)
        if rng.random() < 0.3:
            options["stop_ids"] = rng.integers(0, 50, 5).tolist()
        arrival = int(rng.integers(0, 12))
        found.append(Request(prompt, int(rng.integers(1, 14)), f"r{i}", arrival=arrival, **options))
    return found


def run_workload(seed: int, step_by_step: bool = True) -> Counter:
    """Run one, with its books checked after every step and every request held against itself alone -> what happened."""
    rng = np.random.default_rng([5, seed])
    model = toy(seed=12, **MODELS[seed % len(MODELS)])
    requests = requests_for(rng)
    block_size = int(rng.choice([1, 2, 3, 4, 8]))
    longest = max(len(r.prompt) + r.max_tokens for r in requests)
    budget = int(rng.integers(3, 20))
    engine = Engine(
        model,
        num_blocks=-(-longest // block_size) + int(rng.integers(0, 4)),
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=int(rng.integers(3, budget + 1)),
        prefix_sharing=bool(rng.random() < 0.8),
        headroom=int(rng.integers(0, 2)),
    )
    cancel = {r.id: int(rng.integers(1, 25)) for r in requests if rng.random() < 0.1}
    for r in requests:
        if rng.random() < 0.1:
            r.on_token = fail_at(int(rng.integers(1, 6)))
    logits, watch = record_logits(engine), Watch(engine.scheduler)
    todo = sorted(requests, key=lambda r: r.arrival)
    while todo or engine.unfinished:
        while todo and todo[0].arrival <= engine.trace.step:
            engine.add(todo.pop(0))
        for id, step in cancel.items():
            if step == engine.trace.step and id in engine.scheduler.requests:
                engine.cancel(id)
        engine.step()
        check_books(engine.scheduler)
        assert engine.trace.step < 2000, "no end in sight"
    check_empty(engine.scheduler)
    watch.check()
    for r in engine.scheduler.requests.values():
        check_alone(model, r, logits.get(r, []), step_by_step)
    kinds = Counter(e.kind for e in engine.trace.events)
    return Counter(
        preempted=kinds["preempted"],
        forked=kinds["forked"],
        copied=kinds["copied"],
        hits=sum(e.kind == "admitted" and e.a > 0 for e in engine.trace.events),
        resumed_hits=sum(r.num_preemptions > 0 and r.num_cached_tokens > 0 for r in engine.scheduler.requests.values()),
        chunks=sum(e.kind == "runs" and e.a > 1 and not e.b for e in engine.trace.events),
        tokens=sum(len(r.output) for r in engine.scheduler.requests.values()),
    ) + Counter(str(r.status) for r in engine.scheduler.requests.values())


def run_ten(first: int, step_by_step: bool = False) -> None:
    """Ten workloads, in which what they are there for did happen."""
    happened = sum((run_workload(seed, step_by_step) for seed in range(first, first + 10)), Counter())
    least = {"preempted": 10, "forked": 10, "copied": 2, "hits": 10, "resumed_hits": 3, "chunks": 10, "tokens": 250}
    for what, n in {**least, "stopped": 2, "length": 20}.items():
        assert happened[what] >= n, f"{what} happened {happened[what]} times: {happened}"


def fail_at(n: int):
    def on_token(request, token):
        if len(request.output) >= n:
            raise OSError(f"the line is dead after {n} tokens")

    return on_token
