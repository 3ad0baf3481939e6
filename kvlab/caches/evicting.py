"""Which token a head gives up: the one that attention has used least, and two controls that do not look."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from kvlab.caches.base import Step
from kvlab.caches.budgeted import FAR, EvictingCache
from kvlab.config import check_int


class HeavyHitterCache(EvictingCache):
    """The newest tokens, and the heaviest of the others by the attention that they have drawn so far.

    H2O, arXiv 2306.14048. A token's score is the sum of its attention weights over all queries since it came, its own
    included, and over the query heads (and the layers) that share its key. The lowest score goes; of equal scores, the
    oldest token. (Scores that rounding alone tells apart may fall either way from one chunking to another.)
    budget: tokens kept by each head, or a table (layers, n_kv) of them; kvlab.budgets measures one.
    recent: the newest tokens that cannot go, as a share of the head's budget (float, rounded down) or a number (int).
            H2O splits the budget in halves. 1.0 is a sliding window of `budget` tokens.
    grace:  a token cannot go in the `grace` steps after its own, whatever the share. With recent=0 and grace=0 a new
            token has been weighed by one query, its own, against sums over hundreds: it goes nearly at once.
    Scores count when their step is complete, so a failed one leaves none. They are sums, which cannot be taken apart:
    rewind is refused; fork() before what may have to be taken back.
    Bytes and the rest: EvictingCache.
    """

    wants_weights = keeps_scores = True

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int | None = None,
        budget: int | list[list[int]] = 256,
        recent: int | float = 0.5,
        grace: int = 0,
    ):
        super().__init__(batch_size, max_length, budget, recent, grace)

    def observe(self, layer: int, weights: Tensor) -> None:
        real = self._step.pos[:, None, :, None] >= 0  # padding's weights mean nothing
        drawn = weights.detach().to(self.score[layer].dtype).masked_fill(~real, 0).sum(2)  # (B, n_kv, S)
        self.drawn[layer] = self.drawn[layer] + drawn if layer in self.drawn else drawn  # layers may share one's keys

    def _victim(self, layer: int, pos: Tensor, may_go: Tensor) -> Tensor:
        score = self.slots[layer].by_head(self.score[layer], pos.shape[2]).masked_fill(~may_go, float("inf"))
        lowest = may_go & (score <= score.amin(-1, keepdim=True))
        return pos.masked_fill(~lowest, FAR).argmin(-1)

    def _finish(self, step: Step) -> None:
        for layer, at in self.at.items():
            self.score[layer][self.rows[:, None], at] = 0  # a slot's new token starts anew
        for layer, drawn in self.drawn.items():
            self.slots[layer].add(self.score[layer], drawn)
        super()._finish(step)

    def _forget(self) -> None:
        super()._forget()
        self.drawn: dict[int, Tensor] = {}  # layer -> what the step's queries have added, (B, n_kv, S)

    def _largest_rewind(self, row: int) -> int:
        return 0


class RandomEvictionCache(EvictingCache):
    """The newest tokens, and of the others whichever are left: the victim is drawn, each one as likely as the next.

    A control: what heavy hitters win over it, knowing the scores has won.
    budget, recent, grace: as in HeavyHitterCache.
    seed: the draw for token p in KV head h of layer l is the n * x-th oldest of the n tokens that may go, rounded down,
          with x = random.Random(f"{seed} {l} {h} {p}").random(): it depends on neither chunks nor neighbours.
    """

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int | None = None,
        budget: int | list[list[int]] = 256,
        recent: int | float = 0.5,
        grace: int = 0,
        seed: int = 0,
    ):
        super().__init__(batch_size, max_length, budget, recent, grace)
        self.seed = check_int("seed", seed, 0) or seed

    def _victim(self, layer: int, pos: Tensor, may_go: Tensor) -> Tensor:
        rank = [
            [self._draw(layer, head, p, budget) for head, budget in enumerate(self.budgets_of(layer, pos.shape[1]))]
            for p in self._step.start
        ]
        rank = torch.tensor(rank, device=pos.device).clamp(max=pos.shape[2] - 1)
        return pos.masked_fill(~may_go, FAR).argsort(-1).gather(-1, rank[..., None])[..., 0]

    def _draw(self, layer: int, head: int, p: int, budget: int) -> int:
        x = random.Random(f"{self.seed} {layer} {head} {p}").random()
        return int(x * (budget - self.safe_of(budget) + 1))  # a full head has that many tokens that may go


class FirstLastCache(EvictingCache):
    """The first `first` tokens and the last budget - first: the oldest of the others goes.

    A control that knows nothing of the text. It sees what SlidingWindowCache with `first` sinks sees (StreamingLLM,
    arXiv 2309.17453), from slots that could have held any tokens.
    budget: as in HeavyHitterCache. first: less than the smallest budget, since the newest token stays.
    """

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int | None = None,
        budget: int | list[list[int]] = 256,
        first: int = 4,
    ):
        super().__init__(batch_size, max_length, budget)
        self.first = check_int("first", first, 0) or first
        if first >= (n := min(map(min, self.table))):
            raise ValueError(f"first={first} leaves no room for the newest token in a budget of {n}: at most {n - 1}")

    def _victim(self, layer: int, pos: Tensor, may_go: Tensor) -> Tensor:
        return pos.masked_fill(~may_go | (pos < self.first), FAR).argmin(-1)
