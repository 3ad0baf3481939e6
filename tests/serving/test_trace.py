"""The trace: events that say what happened, from which any step is rebuilt. (The random workloads hold every step of
theirs against what the scheduler had.)"""

import pytest
from books import Watch

from kvlab.caches import BlockPool
from kvlab.serving import PagedAllocator, Request, Scheduler


def scheduler(blocks=4, block_size=2, **options) -> Scheduler:
    return Scheduler(PagedAllocator(BlockPool(blocks, block_size), prefix_sharing=False, headroom=0), **options)


def step(s):
    for request, _ in s.schedule():
        for ready in s.computed(request):
            s.append(ready, 1)
    s.end_step()


def small() -> Scheduler:
    """a decodes; b comes a step later, is preempted, and comes back. Four blocks of two slots."""
    s = scheduler()
    Watch(s)
    s.add(Request([7] * 4, 4, "a"))
    step(s)
    s.add(Request([7] * 2, 3, "b"))
    while s.unfinished:
        step(s)
    return s


def test_every_event_of_a_small_run():
    assert [tuple(e) for e in small().trace.events] == [
        (0, "added", "a", 4, 4),
        (0, "admitted", "a", 0, None),
        (0, "takes", "a", 0, 2),
        (0, "takes", "a", 2, 2),
        (0, "runs", "a", 4, 1),
        (1, "added", "b", 2, 3),
        (1, "takes", "a", 4, 2),
        (1, "admitted", "b", 0, None),
        (1, "takes", "b", 6, 2),
        (1, "runs", "a", 1, 1),
        (1, "runs", "b", 2, 1),
        (2, "releases", "b", None, None),  # it is the newest, and the pool is full
        (2, "preempted", "b", 2, None),
        (3, "takes", "a", 6, 2),
        (4, "releases", "a", None, None),
        (4, "finished", "a", "length", None),
        (4, "admitted", "b", 0, None),
        (4, "takes", "b", 6, 2),
        (4, "takes", "b", 4, 2),
        (4, "runs", "b", 3, 1),
        (5, "runs", "b", 1, 1),
        (6, "releases", "b", None, None),
        (6, "finished", "b", "length", None),
    ]


def test_the_state_at_a_step():
    trace = small().trace
    state = trace.state_at(1)
    assert [r.id for r in state.running] == ["a", "b"] and state.waiting == []
    assert state.holders() == {(0, 2): ["a"], (2, 2): ["a"], (4, 2): ["a"], (6, 2): ["b"]}
    assert (state.num_computed_tokens("a"), state.num_tokens("a")) == (5, 5)
    state = trace.state_at(2)
    assert [(r.id, r.status) for r in state.waiting] == [("b", "preempted")]
    assert (state.num_computed_tokens("b"), state.num_tokens("b")) == (0, 3)
    assert [r.id for r in trace.state_at(5).running] == ["b"] and "a" not in trace.state_at(5).requests
    for bad in (-1, 6, 100):
        with pytest.raises(ValueError, match=f"step {bad} has not run: steps run from 0 to 5"):
            trace.state_at(bad)


def test_who_held_what_and_when():
    held = sorted(small().trace.held(), key=lambda h: (h.start, h.begin))
    assert [tuple(h) for h in held] == [
        ("a", 0, 2, 0, 4),
        ("a", 2, 2, 0, 4),
        ("a", 4, 2, 1, 4),
        ("b", 4, 2, 4, 6),
        ("b", 6, 2, 1, 2),
        ("a", 6, 2, 3, 4),
        ("b", 6, 2, 4, 6),
    ]


def test_the_series():
    trace = small().trace
    series = {name: x.tolist() for name, x in trace.series().items()}
    assert series == {
        "running": [1, 2, 1, 1, 1, 1],
        "waiting": [0, 0, 1, 1, 0, 0],
        "slots": [4, 8, 6, 8, 4, 4],
        "tokens": [4, 7, 6, 7, 3, 4],
        "computed": [4, 3, 1, 1, 3, 1],
        "given": [1, 2, 1, 1, 1, 1],
    }
    assert trace.utilization() == 31 / 34


def test_a_shared_slot_is_held_once_and_a_shared_token_by_each():
    s = scheduler(blocks=9)
    Watch(s)
    s.add(Request([7] * 3, 3, "a", n=3))
    while s.unfinished:
        step(s)
    series = s.trace.series()
    assert series["slots"].tolist() == [4, 8, 14]  # 2 blocks for all; then 2 of them copied; then one more each
    assert series["tokens"].tolist() == [9, 12, 15] and series["running"].tolist() == [3, 3, 3]
    assert series["given"].tolist() == [3, 3, 3] and series["computed"].tolist() == [3, 3, 3]


def test_events_not_snapshots():
    """A request that decodes for 1,000 steps costs an event a block, none a step."""
    s = scheduler(blocks=80, block_size=16, max_num_batched_tokens=16)
    s.add(Request([7] * 8, 1000, "a"))
    while s.unfinished:
        step(s)
    assert s.trace.step == 1000
    blocks = -(-1007 // 16)
    assert len(s.trace.events) == blocks + 6  # added, admitted, runs 8, runs 1, releases, finished
    assert s.trace.series()["tokens"].tolist() == list(range(8, 1008))


def test_nothing_has_happened():
    trace = scheduler().trace
    assert trace.events == [] and list(trace.replay()) == [] and trace.held() == [] and trace.utilization() == 0
    assert all(len(x) == 0 for x in trace.series().values())
