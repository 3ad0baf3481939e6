"""One request as the scheduler sees it: its tokens, how many of them are computed, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvlab.config import check_int
from kvlab.words import kind_of


class Status(StrEnum):
    """Where a request stands. The last five are ends; `reason` of the request then says why, in a sentence."""

    NEW = "new"  # not added yet
    WAITING = "waiting"  # in the queue, holds nothing
    RUNNING = "running"  # holds slots
    PREEMPTED = "preempted"  # in the queue again: its slots were taken, its tokens are kept and computed anew
    STOPPED = "stopped"  # one of its stop ids came
    LENGTH = "length"  # max_tokens came
    CANCELLED = "cancelled"
    FAILED = "failed"  # its on_token raised
    TOO_LONG = "too long"  # it needs more slots than there are

    @property
    def finished(self) -> bool:
        return self not in (Status.NEW, Status.WAITING, Status.RUNNING, Status.PREEMPTED)


@dataclass(eq=False, repr=False)
class Request:
    """A prompt and what to make of it. Counts are in tokens.

    prompt: token ids. A simulation, which computes nothing, may pass any ids of the right number: [0] * 128.
    max_tokens: new tokens at most.   n: samples of this prompt; it is computed once, then forked.
    stop_ids: an id or a list of ids that end the text (and belong to it); None: the model's own.
    temperature, top_k, top_p, seed: as in kvlab.generation.Sampler; sample i draws as row i of a batch would.
    on_token(request, token): called for each new token, between two steps. If it raises, that sample fails alone.
    arrival: when a workload means to add it (in steps or seconds); the scheduler takes requests in the order of add().
    Raises ValueError or TypeError for an empty prompt, for max_tokens or n below 1, and for an id of another kind.
    """

    prompt: list[int]
    max_tokens: int = 16
    id: int | str | None = None  # None: add() gives the next free number
    n: int = 1
    stop_ids: int | list[int] | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    on_token: Callable[[Request, int], None] | None = None
    arrival: float = 0.0

    status: Status = field(default=Status.NEW, init=False)
    reason: str = field(default="", init=False)
    ids: list[int] = field(init=False)  # prompt and new tokens
    num_computed_tokens: int = field(default=0, init=False)  # of them, in slots of the cache: 0 .. num_tokens - 1
    sampler: object = field(default=None, init=False)  # its generators; preemption does not touch them
    index: int = field(default=0, init=False)  # which sample of its prompt
    samples: list[Request] = field(init=False)  # all samples of this prompt, itself the first
    to_fork: list[Request] = field(default_factory=list, init=False)  # samples that wait for its prompt
    order: int = field(default=-1, init=False)  # of arrival
    num_preemptions: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # found in shared blocks instead of being computed
    num_lost_tokens: int = field(default=0, init=False)  # computed, then lost to preemption
    added_step: int | None = field(default=None, init=False)
    first_token_step: int | None = field(default=None, init=False)  # the step that computed its first new token
    finished_step: int | None = field(default=None, init=False)  # the first step that it no longer held anything

    def __post_init__(self):
        if isinstance(self.prompt, str) or not hasattr(self.prompt, "__iter__"):
            raise TypeError(f"prompt is {kind_of(self.prompt)}, not a list of token ids; encode text first")
        self.ids = list(self.prompt)
        if not self.ids:
            raise ValueError("prompt is empty: there must be at least one token (for instance the model's bos id)")
        if self.id is not None and (isinstance(self.id, bool) or not isinstance(self.id, int | str)):
            raise TypeError(f"id={self.id!r} must be an int or a text, or None: the next free number")
        check_int("max_tokens", self.max_tokens)
        check_int("n", self.n)
        self.prompt = self.ids[:]
        self.stops = frozenset(() if self.stop_ids is None else _as_list(self.stop_ids))
        self.samples = [self]

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt)} + {len(self.output)} tokens, {self.num_computed_tokens} computed"
        return f"Request({self.id!r}: {tokens}, {self.status})"

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def output(self) -> list[int]:
        """The new tokens."""
        return self.ids[len(self.prompt) :]

    @property
    def finished(self) -> bool:
        return self.status.finished

    def sample(self, index: int) -> Request:
        """Another request for the same prompt, to be forked from this one."""
        twin = replace(self, id=f"{self.id}/{index}", n=1)
        twin.index, twin.order, twin.samples = index, self.order, self.samples
        twin.stops, twin.sampler = self.stops, self.sampler
        return twin


def _as_list(ids) -> list[int]:
    ids = [ids] if isinstance(ids, int) else list(ids)
    for i in ids:
        check_int("stop id", i, 0)
    return ids
