"""A state machine drives the scheduler and its pool: whatever the order of events, the books balance, and every slot
holds the token that its request thinks is there."""

from books import Watch, check_books, check_empty
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvlab.caches import BlockPool
from kvlab.serving import PagedAllocator, Request, Scheduler, Status

OPENINGS = ([], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9])


class NotedPool(BlockPool):
    """Instead of keys and values, a slot keeps the text up to its token: equal texts have equal keys."""

    def __init__(self, *args):
        super().__init__(*args)
        self.slots = {}  # (block, offset) -> text

    def copy(self, source, target):
        for i in range(self.block_size):
            self.slots[target, i] = self.slots.get((source, i))
        return super().copy(source, target)


class Serving(RuleBasedStateMachine):
    ids = Bundle("ids")

    @initialize(
        blocks=st.integers(2, 12),
        block_size=st.integers(1, 4),
        budget=st.integers(3, 12),
        sharing=st.booleans(),
        headroom=st.integers(0, 1),
        continuous=st.sampled_from([True, True, False]),
    )
    def make(self, blocks, block_size, budget, sharing, headroom, continuous):
        self.pool = NotedPool(blocks, block_size)
        self.s = Scheduler(PagedAllocator(self.pool, sharing, headroom), budget, 3, continuous)
        self.watch, self.tokens = Watch(self.s), 0

    @rule(
        target=ids,
        opening=st.sampled_from(OPENINGS),
        rest=st.lists(st.integers(1, 3), min_size=1, max_size=5),
        max_tokens=st.integers(1, 8),
        n=st.integers(1, 3),
        stop=st.sampled_from([[], [], [1], [2, 3]]),
        fails_at=st.sampled_from([0, 0, 0, 1, 2]),
    )
    def add(self, opening, rest, max_tokens, n, stop, fails_at):
        def on_token(request, token):
            if len(request.output) == fails_at:
                raise ValueError("planted")

        request = self.s.add(Request(opening + rest, max_tokens, n=n, stop_ids=stop, on_token=on_token))
        assert request.finished == (request.num_tokens > self.s.allocator.num_slots)
        return request.id

    @rule(id=consumes(ids), sample=st.integers(0, 2))
    def cancel(self, id, sample):
        samples = self.s.requests[id].samples
        request = samples[sample % len(samples)]
        ended = request.status if request.finished else None
        self.s.cancel(request.id)
        assert request.status is (ended or Status.CANCELLED)

    @precondition(lambda self: self.s.unfinished)
    @rule(fails_after=st.sampled_from([None, None, None, None, 0, 1]))
    def step(self, fails_after):
        """fails_after: the model raises after that many requests of the plan."""
        plan = self.s.schedule()
        assert sum(n for _, n in plan) <= self.s.max_num_batched_tokens
        for i, (request, n) in enumerate(plan):
            assert 1 <= n <= request.num_tokens - request.num_computed_tokens
            if i == fails_after:
                break
            table, bs, start = self.s.allocator.rows[request].table, self.pool.block_size, request.num_computed_tokens
            for p in range(start, start + n):
                block = table[p // bs]
                assert self.pool.ref[block] == 1, "nobody writes into a block that another has"
                self.pool.slots[block, p % bs] = tuple(request.ids[: p + 1])
            for ready in self.s.computed(request):
                self.tokens += 1
                self.s.append(ready, 1 + (self.tokens * 7 + ready.index) % 3)
        self.s.end_step()

    @rule()
    def many_steps(self):
        for _ in range(5):
            if self.s.unfinished:
                self.step(None)
                self.books()

    @invariant()
    def books(self):
        if not hasattr(self, "s"):
            return
        check_books(self.s)
        bs = self.pool.block_size
        for request, row in self.s.allocator.rows.items():
            for p in range(request.num_computed_tokens):
                assert self.pool.slots[row.table[p // bs], p % bs] == tuple(request.ids[: p + 1])

    def teardown(self):
        if not hasattr(self, "s"):
            return
        steps = 0
        while self.s.unfinished:
            self.step(None)
            self.books()
            steps += 1
            assert steps < 5000, "no end in sight"
        check_empty(self.s)
        if self.s.trace.step:
            self.watch.check()


Serving.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestServing = Serving.TestCase
