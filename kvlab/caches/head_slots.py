"""Slots for each head: how many it has, and where they lie when heads have different numbers of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.config import check_int


class HeadSlots:
    """budgets[h] slots for head h of one layer, one head's after the other's: a tensor (B, sum of budgets, ...).

    Nothing is padded where it is stored. by_head() makes the padded (B, n_kv, S, ...) that attention wants: a plain
    view where all heads have the same budget, a gathered temporary where they differ.
    """

    def __init__(self, budgets: list[int], device):
        self.budgets, self.total, self.most = budgets, sum(budgets), max(budgets)
        self.even = min(budgets) == self.most
        self.size = torch.tensor(budgets, device=device)  # (n_kv,)
        self.start = self.size.cumsum(0) - self.size  # each head's first slot

    def places(self, S: int) -> tuple[Tensor, Tensor]:
        """Where slot s < S of each head lies, and whether it has that many -> two tensors (n_kv, S)."""
        s = torch.arange(S, device=self.size.device)
        return self.start[:, None] + s.minimum(self.size[:, None] - 1), s < self.size[:, None]

    def by_head(self, x: Tensor, S: int, nothing: int | None = None) -> Tensor:
        """The first S slots of each head, x (B, total, ...) -> (B, n_kv, S, ...). A head with fewer slots gets
        `nothing` in the others or, if that is None, its last slot again."""
        if self.even:
            return x.unflatten(1, (len(self.budgets), self.most))[:, :, :S]
        places, real = self.places(S)
        x = x[:, places]
        return x if nothing is None else x.masked_fill(~real, nothing)

    def add(self, x: Tensor, y: Tensor) -> None:
        """x (B, total) += y (B, n_kv, S) in the slots that are there."""
        if self.even:
            self.by_head(x, y.shape[2]).add_(y)
        else:
            places, real = self.places(y.shape[2])
            x[:, places[real]] += y[:, real]


def read_budget(budget) -> int | list[list[int]]:
    """An int, or a table of ints: a row for each layer, an entry for each KV head. Raises ValueError, TypeError."""
    if isinstance(budget, Tensor):
        budget = budget.tolist()
    if isinstance(budget, (int, float, str)) or not hasattr(budget, "__iter__"):
        return check_int("budget", budget) or budget
    table = [list(row) if hasattr(row, "__iter__") else row for row in budget]
    if not table or not all(isinstance(row, list) and row and len(row) == len(table[0]) for row in table):
        raise ValueError(
            f"budget={budget!r} must be an int, or a table with as many ints, one for each head, in every layer"
        )
    for layer, row in enumerate(table):
        for head, n in enumerate(row):
            check_int(f"budget[{layer}][{head}]", n)
    return table


def read_share(name: str, share) -> int | float:
    """A number of tokens (int) or a share of the budget (float, 0 to 1). Raises ValueError, TypeError."""
    if not isinstance(share, float):
        return check_int(name, share, 0) or share
    if not 0 <= share <= 1:
        raise ValueError(f"{name}={share} must be a share of the budget from 0.0 to 1.0, or a whole number of tokens")
    return share
