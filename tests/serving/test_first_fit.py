"""FirstFit: ranges never overlap, no slot is lost, and half the memory may be free and useless."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.serving.first_fit import FirstFit

SIZE = 60


class Walk(RuleBasedStateMachine):
    """Against a plain list of owners, one a slot, searched slot by slot."""

    def __init__(self):
        super().__init__()
        self.fit, self.owner, self.made = FirstFit(SIZE), [None] * SIZE, 0

    def starts(self):
        return sorted(self.fit.held)

    @rule(n=st.integers(1, 40))
    def allocate(self, n):
        expected = next((s for s in range(SIZE - n + 1) if not any(self.owner[s : s + n])), None)
        assert self.fit.allocate(n) == expected
        if expected is not None:
            self.made += 1
            self.owner[expected : expected + n] = [self.made] * n

    @precondition(lambda self: self.fit.held)
    @rule(data=st.data(), more=st.integers(1, 20))
    def extend(self, data, more):
        start = data.draw(st.sampled_from(self.starts()))
        end = start + self.owner.count(self.owner[start])
        fits = end + more <= SIZE and not any(self.owner[end : end + more])
        assert self.fit.extend(start, end + more - start) == fits
        if fits:
            self.owner[end : end + more] = [self.owner[start]] * more

    @precondition(lambda self: self.fit.held)
    @rule(data=st.data())
    def release(self, data):
        start = data.draw(st.sampled_from(self.starts()))
        me = self.owner[start]
        assert self.fit.release(start) == self.owner.count(me)
        self.owner = [None if owner == me else owner for owner in self.owner]

    @invariant()
    def the_books_balance(self):
        self.fit.check()
        free = [owner is None for owner in self.owner]
        assert self.fit.free == sum(free)
        runs = "".join("-" if f else " " for f in free).split()
        assert self.fit.largest_gap == max(map(len, runs), default=0)
        assert self.fit.fragmentation == (1 - max(map(len, runs)) / sum(free) if any(free) else 0)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_half_the_memory_is_free_and_an_allocation_fails():
    fit = FirstFit(64)
    starts = [fit.allocate(8) for _ in range(8)]
    assert starts == [0, 8, 16, 24, 32, 40, 48, 56] and fit.allocate(1) is None
    for start in starts[::2]:
        fit.release(start)
    assert (fit.free, fit.largest_gap, fit.fragmentation) == (32, 8, 0.75)
    assert fit.allocate(9) is None and fit.allocate(8) == 0
    fit.release(8)  # and the gaps beside it become one
    assert fit.gaps == [(8, 16), (32, 8), (48, 8)]


def test_misuse_is_named_and_changes_nothing():
    fit = FirstFit(16)
    fit.allocate(4)
    for call, says in [
        (lambda: FirstFit(0), "size=0"),
        (lambda: fit.allocate(0), "n=0"),
        (lambda: fit.allocate(1.5), "n=1.5 must be an int"),
        (lambda: fit.release(1), "no range in use starts at slot 1"),
        (lambda: fit.extend(3, 9), "no range in use starts at slot 3"),
        (lambda: fit.extend(0, 4), "4 slots already"),
    ]:
        with pytest.raises((ValueError, TypeError), match=says):
            call()
    assert (fit.gaps, fit.held, fit.free) == ([(4, 12)], {0: 4}, 12)
    fit.release(0)
    with pytest.raises(ValueError, match="no range in use starts at slot 0"):
        fit.release(0)


@pytest.mark.parametrize(
    "break_it, says",
    [
        (lambda fit: fit.gaps.append((2, 1)), "a hole or an overlap"),
        (lambda fit: fit.gaps.__setitem__(slice(None), [(4, 6), (10, 6)]), "not joined"),
        (lambda fit: fit.held.clear(), "a hole or an overlap"),
        (lambda fit: setattr(fit, "free", 3), "counted as free"),
    ],
)
def test_check_finds_broken_books(break_it, says):
    fit = FirstFit(16)
    fit.allocate(4)
    break_it(fit)
    with pytest.raises(RuntimeError, match=says):
        fit.check()
