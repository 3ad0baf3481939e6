"""The scheduler's decisions, without a model: who runs, how many tokens, who makes way, how requests end."""

import pytest
from books import Watch, check_books, check_empty

from kvlab.caches import BlockPool
from kvlab.serving import Allocator, PagedAllocator, Request, Scheduler, Status


def paged(blocks=8, block_size=4, prefix_sharing=False, headroom=0, **options) -> Scheduler:
    return Scheduler(PagedAllocator(BlockPool(blocks, block_size), prefix_sharing, headroom), **options)


def request(prompt: int, max_tokens=4, id=None, **options) -> Request:
    return Request([7] * prompt, max_tokens, id, **options)


def step(s: Scheduler, token=1) -> dict:
    """One step without a model -> {id: tokens computed}."""
    plan = s.schedule()
    for r, _ in plan:
        for ready in s.computed(r):
            s.append(ready, token)
    s.end_step()
    if isinstance(s.allocator, PagedAllocator):
        check_books(s)
    return {r.id: n for r, n in plan}


def run(s: Scheduler) -> list[dict]:
    plans = []
    while s.unfinished:
        plans.append(step(s))
        assert len(plans) < 10_000
    return plans


# ---- who runs, and how many tokens


def test_a_prompt_and_its_tokens_take_as_many_steps_as_tokens():
    s = paged()
    r = s.add(request(5, max_tokens=3))
    assert run(s) == [{0: 5}, {0: 1}, {0: 1}]
    assert (r.status, r.reason, r.output) == (Status.LENGTH, "max_tokens=3 came", [1, 1, 1])
    assert (r.added_step, r.first_token_step, r.finished_step) == (0, 0, 3)
    check_empty(s)


def test_requests_join_and_leave_between_steps():
    s = paged(max_num_batched_tokens=8)
    s.add(request(3, 3, "a"))
    assert step(s) == {"a": 3}
    s.add(request(2, 1, "b"))
    assert step(s) == {"a": 1, "b": 2}
    assert step(s) == {"a": 1} and not s.unfinished


def test_a_static_batch_is_joined_by_nobody():
    s = paged(blocks=20, continuous=False)
    for id, n in (("a", 3), ("b", 1)):
        s.add(request(2, n, id))
    assert step(s) == {"a": 2, "b": 2}
    s.add(request(2, 1, "c"))
    assert run(s) == [{"a": 1}, {"a": 1}, {"c": 2}]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes():
    s = paged(blocks=20, max_num_batched_tokens=4)
    s.add(request(2, 9, "a"))
    step(s)
    s.add(request(8, 2, "b"))
    assert [step(s) for _ in range(4)] == [{"a": 1, "b": 3}, {"a": 1, "b": 3}, {"a": 1, "b": 2}, {"a": 1, "b": 1}]


def test_the_budget_is_kept_and_decodes_come_first():
    s = paged(blocks=40, max_num_batched_tokens=5, max_num_seqs=5)
    for i in range(4):
        s.add(request(6, 8, i))
    for plan in run(s):
        assert sum(plan.values()) <= 5
    order = [r.finished_step for r in s.requests.values()]
    assert order == sorted(order)


def test_without_tokens_to_spare_a_prompt_waits_with_what_it_holds():
    s = paged(blocks=20, max_num_batched_tokens=2)
    s.add(request(1, 9, "a"))
    s.add(request(6, 2, "b"))
    assert step(s) == {"a": 1, "b": 1}
    s.add(request(1, 9, "c"))
    assert [step(s) for _ in range(5)] == [{"a": 1, "b": 1}] * 5
    assert step(s) == {"a": 1, "b": 1}  # b decodes now: there is no token left for c
    assert s.requests["b"].finished and step(s) == {"a": 1, "c": 1}


def test_no_more_than_max_num_seqs_run_and_samples_count():
    s = paged(blocks=40, max_num_seqs=3)
    s.add(request(2, 3, "a", n=2))
    s.add(request(2, 3, "b", n=2))
    s.add(request(2, 3, "c"))
    assert step(s) == {"a": 2}  # b needs two seats; c does not overtake it
    assert step(s) == {"a": 1, "a/1": 1}
    run(s)
    assert {r.status for r in s.requests.values()} == {Status.LENGTH} and len(s.requests) == 5


# ---- slots


def test_admission_waits_for_free_blocks_and_nobody_overtakes():
    s = paged(blocks=4, block_size=4)
    s.add(request(9, 3, "a"))
    s.add(request(6, 1, "b"))
    s.add(request(1, 1, "c"))
    assert step(s) == {"a": 9} and [r.id for r in s.waiting] == ["b", "c"]
    assert step(s) == {"a": 1} and step(s) == {"a": 1}
    assert step(s) == {"b": 6, "c": 1}


def test_headroom_leaves_blocks_to_those_who_run():
    for headroom, joins in ((0, {"b": 4}), (1, {})):
        s = paged(blocks=2, block_size=4, headroom=headroom)
        s.add(request(4, 2, "a"))
        s.add(request(4, 1, "b"))
        assert step(s) == {"a": 4, **joins}
        run(s)
        assert s.num_preemptions == 0 if headroom else s.requests["a"].status is Status.LENGTH


def test_the_newest_makes_way_keeps_its_tokens_and_goes_to_the_front():
    s = paged(blocks=4, block_size=4)
    for id in "abc":
        s.add(request(4, 6, id))
    s.add(request(4, 1, "d"))
    assert step(s) == {"a": 4, "b": 4, "c": 4, "d": 4}  # four blocks, all full; d ends
    assert step(s) == {"a": 1, "b": 1}  # a takes the last block, b takes c's
    c = s.requests["c"]
    assert (c.status, c.num_computed_tokens, c.output, c.num_lost_tokens) == (Status.PREEMPTED, 0, [1], 4)
    s.add(request(1, 1, "e"))
    assert [r.id for r in s.waiting] == ["c", "e"]
    plans = run(s)
    assert next(p["c"] for p in plans if "c" in p) == 5  # its token is computed with the prompt
    assert c.output == [1] * 6 and c.num_preemptions == 1
    check_empty(s)


def test_a_pool_that_runs_dry_in_a_prompt():
    """Chunks are admitted one by one, so a long prompt can meet a pool that decodes have filled meanwhile."""
    s = paged(blocks=4, block_size=2, max_num_batched_tokens=3)
    s.add(request(2, 5, "a"))
    s.add(request(5, 1, "b"))
    assert [step(s) for _ in range(3)] == [{"a": 2, "b": 1}, {"a": 1, "b": 2}, {"a": 1}]
    b = s.requests["b"]
    assert (b.status, b.num_lost_tokens, b.output) == (Status.PREEMPTED, 3, [])  # in the middle of its prompt
    run(s)
    assert {r.status for r in s.requests.values()} == {Status.LENGTH}
    check_empty(s)


def test_the_oldest_always_goes_on():
    """Whatever the pool, a request is never preempted for a newer one, so that every run ends."""
    s = paged(blocks=3, block_size=2)
    for i in range(6):
        s.add(request(1 + i % 3, 3, i))
    run(s)
    assert s.requests[0].num_preemptions == 0 and s.num_preemptions >= 1
    assert all(len(r.output) == 3 for r in s.requests.values())
    check_empty(s)


# ---- ends


def test_a_prompt_longer_than_the_pool_ends_at_once():
    s = paged(blocks=2, block_size=4)
    s.add(request(4, 2, "a"))
    r = s.add(request(9, 2, "b", n=2))
    assert [x.status for x in r.samples] == [Status.TOO_LONG] * 2
    assert r.reason == "its 9 tokens do not fit in 8 slots" and r.finished_step == 0
    assert run(s) == [{"a": 4}, {"a": 1}]
    check_empty(s)


def test_a_request_that_outgrows_the_pool_keeps_what_it_said():
    s = paged(blocks=2, block_size=4)
    a, b = s.add(request(5, 50, "a")), s.add(request(2, 2, "b"))
    run(s)
    assert (a.status, a.reason) == (Status.TOO_LONG, "its 9 tokens do not fit in 8 slots") and a.output == [1] * 4
    assert (b.status, b.output) == (Status.LENGTH, [1, 1])
    check_empty(s)


def test_a_request_that_nobody_admits_ends():
    """An allocator that says it fits, and has no room for it even in empty memory: waiting would last for ever."""

    class Stingy(Allocator):
        def grow(self, request, tokens):
            return False

    s = Scheduler(Stingy(16))
    for id in "ab":
        s.add(request(2, 2, id, n=2))
    assert s.schedule() == [] and not s.unfinished
    assert {r.status for r in s.requests.values()} == {Status.TOO_LONG} and len(s.requests) == 4


def test_stop_ids_end_a_text_and_belong_to_it():
    s = paged()
    r = s.add(request(2, 9, stop_ids=[5, 6]))
    step(s, 1)
    step(s, 6)
    assert (r.status, r.reason, r.output) == (Status.STOPPED, "stop id 6 came", [1, 6])


@pytest.mark.parametrize("when", [0, 1, 3])
def test_cancel_before_during_and_between(when):
    s = paged(blocks=5, block_size=2, max_num_batched_tokens=4)
    for id in "abc":
        s.add(request(3, 5, id))
    for _ in range(when):
        step(s)
    s.cancel("b")
    check_books(s)
    run(s)
    assert (s.requests["b"].status, s.requests["b"].reason) == (Status.CANCELLED, "cancelled")
    assert [s.requests[id].output for id in "ac"] == [[1] * 5] * 2
    s.cancel("a")  # it has ended: nothing happens
    assert s.requests["a"].status is Status.LENGTH
    with pytest.raises(KeyError, match="no request has the id 'x'"):
        s.cancel("x")
    check_empty(s)


def test_cancelling_samples():
    s = paged(blocks=20, max_num_batched_tokens=4)
    a, b = s.add(request(6, 3, "a", n=3)), s.add(request(2, 3, "b", n=2))
    step(s)
    s.cancel("a/1")  # waits for the prompt of a
    s.cancel("b")  # and with it b/1, whose prompt will not come
    run(s)
    assert [x.status for x in a.samples] == [Status.LENGTH, Status.CANCELLED, Status.LENGTH]
    assert [x.status for x in b.samples] == [Status.CANCELLED] * 2 and b.output == []
    check_empty(s)


# ---- callbacks


def test_a_failing_callback_ends_its_request_alone():
    def fail(r, token):
        if len(r.output) == 2:
            raise OSError("the line is dead")

    s = paged()
    a, b = s.add(request(2, 4, "a", on_token=fail)), s.add(request(2, 4, "b"))
    last = s.add(request(2, 2, "last", on_token=fail))  # fails on the token that completes it
    run(s)
    for r in (a, last):
        assert (r.status, r.reason) == (Status.FAILED, "on_token raised OSError: the line is dead")
        assert r.output == [1, 1]
    assert b.status is Status.LENGTH
    check_empty(s)


def test_a_callback_may_add_and_cancel():
    s, heard = paged(), []

    def on_token(r, token):
        heard.append((r.id, token, r.status))
        if len(r.output) == 2:
            s.cancel("b")
            s.cancel(r.id)
            s.add(request(1, 1, "c"))

    s.add(request(2, 4, "a", on_token=on_token))
    s.add(request(2, 4, "b", on_token=on_token))
    run(s)
    assert [x[0] for x in heard] == ["a", "b", "a"]  # b's second token is not told: it was cancelled before
    assert [str(s.requests[id].status) for id in "abc"] == ["cancelled", "cancelled", "length"]
    check_empty(s)


def test_a_callback_must_not_start_a_step():
    s = paged()
    r = s.add(request(2, 4, on_token=lambda r, t: s.schedule()))
    run(s)
    assert r.status is Status.FAILED and "RuntimeError: a step is running already" in r.reason
    check_empty(s)


def test_an_interrupt_in_a_callback_leaves_the_books_right():
    heard = []

    def on_token(r, token):
        heard.append(r.id)
        if heard == ["a"]:
            raise KeyboardInterrupt

    s = paged()
    for id in "ab":
        s.add(request(2, 1, id, on_token=on_token))
    with pytest.raises(KeyboardInterrupt):
        step(s)
    assert s.requests["a"].status is Status.LENGTH and s.unfinished
    assert s.schedule() == [] and heard == ["a", "b"]  # nobody is told twice, nobody is forgotten
    s.end_step()
    check_empty(s)


# ---- a step that is not computed


def test_what_was_planned_and_not_computed_is_planned_again():
    s = paged(blocks=4, block_size=4, max_num_batched_tokens=8)
    for id in "ab":
        s.add(request(6, 2, id))
    watch = Watch(s)
    plan = s.schedule()
    s.append(*[(r, 1) for r in s.computed(plan[0][0])][0])
    with pytest.raises(RuntimeError, match="a step is running already"):
        s.schedule()
    with pytest.raises(RuntimeError, match="a step is running: cancel between two steps"):
        s.cancel("b")
    s.end_step()
    check_books(s)
    assert s.requests["b"].num_computed_tokens == 0 and s.allocator.slots_held(s.requests["b"]) == 0
    assert run(s)[0] == {"a": 1, "b": 6}
    assert {r.status for r in s.requests.values()} == {Status.LENGTH}
    check_empty(s)
    assert len(watch.seen) == s.trace.step


# ---- bad input


def test_bad_input_changes_nothing():
    for bad, error, said in (
        (lambda: Request([]), ValueError, "prompt is empty: there must be at least one token"),
        (lambda: Request("hello"), TypeError, "prompt is a str, not a list of token ids; encode text first"),
        (lambda: Request(5), TypeError, "prompt is an int, not a list of token ids"),
        (lambda: Request([1], 0), ValueError, "max_tokens=0 must be at least 1"),
        (lambda: Request([1], 2.5), TypeError, "max_tokens=2.5 must be an int"),
        (lambda: Request([1], n=0), ValueError, "n=0 must be at least 1"),
        (lambda: Request([1], id=[1]), TypeError, r"id=\[1\] must be an int or a text"),
        (lambda: Request([1], id=True), TypeError, "id=True must be an int or a text"),
        (lambda: paged(headroom=-1), ValueError, "headroom=-1 must be at least 0"),
        (lambda: Request([1], stop_ids=["x"]), TypeError, "stop id='x' must be an int"),
        (lambda: paged(max_num_batched_tokens=0), ValueError, "max_num_batched_tokens=0 must be at least 1"),
        (lambda: paged(max_num_batched_tokens=4, max_num_seqs=5), ValueError, "max_num_seqs=5 requests decode one"),
    ):
        with pytest.raises(error, match=said):
            bad()
    s = paged(max_num_seqs=2)
    a = s.add(request(2, 2, "a", n=2))
    before = (list(s.waiting), dict(s.requests), list(s.trace.events))
    for bad, error, said in (
        (request(1, id="a"), ValueError, r"request id 'a' is in use already \(waiting\)"),
        (request(1, id="a/1"), ValueError, "request id 'a/1' is in use already"),
        (a, ValueError, r"request 'a' was added before \(it is waiting\): make a new one"),
        (request(1, n=3), ValueError, "n=3 samples cannot run together: max_num_seqs=2"),
        ([1, 2], TypeError, r"\[1, 2\] must be a Request"),
    ):
        with pytest.raises(error, match=said):
            s.add(bad)
        assert (list(s.waiting), dict(s.requests), list(s.trace.events)) == before
    run(s)
    with pytest.raises(ValueError, match=r"request id 'a' is in use already \(length\)"):
        s.add(request(1, id="a"))
    with pytest.raises(ValueError, match="was added before"):
        s.add(a)


# ---- any allocator will do


class WholeMemory(Allocator):
    """The smallest allocator: everything to one request at a time."""

    def grow(self, request, tokens):
        if tokens > self.num_slots or (self.held and request not in self.held):
            return False
        if request not in self.held:
            self.take(request, 0, self.num_slots)
        return True


def test_an_allocator_of_ten_lines():
    s = Scheduler(WholeMemory(16))
    a, b = s.add(request(3, 2, "a", n=2)), s.add(request(20, 1, "b"))
    assert run(s) == [{"a": 3}, {"a": 1}, {"a/1": 3}, {"a/1": 1}]  # no fork: each computes the prompt by itself
    assert [x.output for x in a.samples] == [[1, 1]] * 2 and b.status is Status.TOO_LONG
    held = s.trace.held()
    assert [(h.request, h.start, h.slots, h.begin, h.end) for h in held] == [("a", 0, 16, 0, 2), ("a/1", 0, 16, 2, 4)]
    assert s.trace.utilization() == (3 + 4) * 2 / (4 * 16)
    assert s.allocator.held == {} and s.allocator.slots_free == 16
    with pytest.raises(NotImplementedError, match="Allocator must say how a request grows"):
        Allocator(4).grow(a, 1)
    with pytest.raises(NotImplementedError, match="WholeMemory does not offer fork"):
        WholeMemory(4).fork(a, a)
