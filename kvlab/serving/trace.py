"""What happened, step by step, as events and not as snapshots: any step's state is rebuilt from them.

Steps are numbered from 0. What happens between two steps (a callback, an end, cancel(), add()) is stamped with the step
that follows: so a piece taken at step 5 and released at step 9 was held during the steps 5, 6, 7 and 8.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np


class Event(NamedTuple):
    """kind       a                            b
    added         tokens of the prompt         max_tokens
    admitted      tokens found in shared blocks
    forked        id of the parent             tokens that it starts with; this step gives it a token as well
    runs          tokens computed in each step from this one on, until the next "runs", "preempted" or "finished"
                                               1 if each of these steps gives a new token, else 0
    takes         first slot                   slots: the request holds them from this step on
    gives         first slot                   slots: no longer
    copied        first slot of the source     first slot of the copy (copy on write, or a move)
    releases      (all that it still held)
    preempted     tokens that must be computed anew
    finished      status
    """

    step: int
    kind: str
    request: int | str
    a: int | str | None = None
    b: int | None = None


class Held(NamedTuple):
    """One piece of memory in one request's hands during the steps from .. to - 1."""

    request: int | str
    start: int  # first slot
    slots: int
    begin: int
    end: int


@dataclass
class Now:
    """One request at one step: after the step's forward pass, before its new token is appended."""

    id: int | str
    num_prompt_tokens: int
    status: str = "waiting"
    pieces: list[tuple[int, int]] = field(default_factory=list)  # (first slot, slots), in the order of its tokens
    num_cached_tokens: int = 0
    computed: int = 0  # before step `since`
    tokens: int = 0
    rate: int = 0
    gives: int = 0
    since: int = 0

    def num_computed_tokens(self, step: int) -> int:
        return self.computed + self.rate * (step - self.since + 1)

    def num_tokens(self, step: int) -> int:
        return self.tokens + self.gives * (step - self.since)

    def change(self, step: int, rate: int, gives: int) -> None:
        """From this step on it computes `rate` tokens a step."""
        self.computed, self.tokens = self.num_computed_tokens(step - 1), self.num_tokens(step)
        self.rate, self.gives, self.since = rate, gives, step


@dataclass
class State:
    """Everybody at one step. requests holds those added and not finished, in order of arrival."""

    step: int = -1
    requests: dict[int | str, Now] = field(default_factory=dict)

    @property
    def running(self) -> list[Now]:
        return [r for r in self.requests.values() if r.status == "running"]

    @property
    def waiting(self) -> list[Now]:
        return [r for r in self.requests.values() if r.status != "running"]

    def holders(self) -> dict[tuple[int, int], list[int | str]]:
        """Piece (first slot, slots) -> ids of the requests that hold it."""
        found: dict[tuple[int, int], list[int | str]] = {}
        for r in self.requests.values():
            for piece in r.pieces:
                found.setdefault(piece, []).append(r.id)
        return found

    def num_computed_tokens(self, id: int | str) -> int:
        return self.requests[id].num_computed_tokens(self.step)

    def num_tokens(self, id: int | str) -> int:
        return self.requests[id].num_tokens(self.step)

    def apply(self, e: Event) -> None:
        if e.kind == "added":
            self.requests[e.request] = Now(e.request, e.a, tokens=e.a, since=e.step)
            return
        r = self.requests[e.request]
        if e.kind == "admitted":
            r.change(e.step, 0, 0)
            r.status, r.computed, r.num_cached_tokens = "running", e.a, e.a
        elif e.kind == "forked":  # after this step's forward pass: it has its first token with the parent
            r.status, r.computed, r.gives, r.since = "running", e.b, 1, e.step
        elif e.kind == "runs":
            r.change(e.step, e.a, e.b)
        elif e.kind == "takes":
            r.pieces.append((e.a, e.b))
        elif e.kind == "gives":
            r.pieces.remove((e.a, e.b))
        elif e.kind == "releases":
            r.pieces.clear()
        elif e.kind == "preempted":
            r.change(e.step, 0, 0)
            r.status, r.computed, r.num_cached_tokens = "preempted", 0, 0
        elif e.kind == "finished":
            del self.requests[e.request]


class Trace:
    """The events of one scheduler. `step` is the step that runs now or comes next; so many are complete."""

    def __init__(self, num_slots: int, slots_per_piece: int | None = None):
        self.num_slots = num_slots
        self.slots_per_piece = slots_per_piece  # the block size, where all pieces are blocks
        self.events: list[Event] = []
        self.step = 0
        self._rates: dict = {}  # request -> its last (n, gives)

    # ---- the scheduler and the allocator write

    def note(self, kind: str, request, a=None, b=None) -> None:
        self.events.append(Event(self.step, kind, request.id, a, b))

    def take(self, request, start: int, slots: int) -> None:
        self.note("takes", request, start, slots)

    def give(self, request, start: int, slots: int) -> None:
        self.note("gives", request, start, slots)

    def release(self, request) -> None:
        self.note("releases", request)

    def run(self, request, n: int, gives: int) -> None:
        """It computes n tokens in this step. Only a change is an event."""
        if self._rates.get(request, (0, 0)) != (n, gives):
            self._rates[request] = n, gives
            self.note("runs", request, n, gives)

    def fork(self, parent, child) -> None:
        """The child starts with all that the parent has computed, and is given a token in this step."""
        self._rates[child] = 0, 1
        self.note("forked", child, parent.id, child.num_computed_tokens)

    def stop(self, kind: str, request, a) -> None:
        """Preempted or finished: it computes nothing any more."""
        self._rates.pop(request, None)
        self.note(kind, request, a)

    # ---- pictures and tables read

    def replay(self) -> Iterator[State]:
        """The state at step 0, 1, 2, ...: one object that moves on; look at it before you go on."""
        state, i = State(), 0
        for state.step in range(self.step):
            while i < len(self.events) and self.events[i].step <= state.step:
                state.apply(self.events[i])
                i += 1
            yield state

    def state_at(self, step: int) -> State:
        """The state at this step. Raises ValueError for a step that has not run."""
        if not 0 <= step < self.step:
            raise ValueError(f"step {step} has not run: steps run from 0 to {self.step - 1}")
        state = State(step)
        for event in self.events:
            if event.step > step:
                break
            state.apply(event)
        return state

    def held(self) -> list[Held]:
        """Who held which piece, and when: the rectangles of a picture of memory over time."""
        open_: dict[int | str, dict[tuple[int, int], int]] = {}
        done: list[Held] = []
        for e in self.events:
            mine = open_.setdefault(e.request, {})
            if e.kind == "takes":
                mine[e.a, e.b] = e.step
            elif e.kind == "gives":
                done.append(Held(e.request, e.a, e.b, mine.pop((e.a, e.b)), e.step))
            elif e.kind == "releases":
                done += [Held(e.request, *piece, begin, e.step) for piece, begin in mine.items()]
                mine.clear()
        done += [Held(id, *piece, begin, self.step) for id, mine in open_.items() for piece, begin in mine.items()]
        return [h for h in done if h.end > h.begin]

    def series(self) -> dict[str, np.ndarray]:
        """Per step, arrays (steps,): requests running and waiting; slots held (a shared one once); tokens held (a
        shared one counts for each holder); tokens computed in the step; new tokens given."""
        names = ("running", "waiting", "slots", "tokens", "computed", "given")
        change = {name: np.zeros(self.step + 2, dtype=np.int64) for name in names}
        state, holders = State(), Counter()

        def free(piece, step):
            holders[piece] -= 1
            if not holders[piece]:
                change["slots"][step] -= piece[1]

        for e in self.events:
            s, r = e.step, state.requests.get(e.request)
            if e.kind == "takes":
                if not holders[e.a, e.b]:
                    change["slots"][s] += e.b
                holders[e.a, e.b] += 1
            elif e.kind == "gives":
                free((e.a, e.b), s)
            elif e.kind == "releases":
                for piece in r.pieces:
                    free(piece, s)
            elif e.kind == "runs":
                change["computed"][s] += e.a - r.rate
                change["given"][s] += e.b - r.gives
            elif e.kind in ("preempted", "finished"):
                change["tokens"][s] -= r.num_computed_tokens(s - 1)
                change["computed"][s] -= r.rate
                change["given"][s] -= r.gives
            elif e.kind == "admitted":
                change["tokens"][s] += e.a
            elif e.kind == "forked":
                change["tokens"][s] += e.b
                change["given"][s] += 1
            was = r.status == "running" if r else None
            state.apply(e)
            r = state.requests.get(e.request)
            now = r.status == "running" if r else None
            change["running"][s] += bool(now) - bool(was)
            change["waiting"][s] += (now is False) - (was is False)
        out = {name: x.cumsum()[: self.step] for name, x in change.items()}
        out["tokens"] = out["tokens"] + out["computed"].cumsum()
        return out

    def utilization(self) -> float:
        """Tokens held over slots held, both summed over all steps. Sharing can lift it above 1."""
        series = self.series()
        return float(series["tokens"].sum() / max(1, series["slots"].sum()))
