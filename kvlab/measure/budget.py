"""How much to measure: one switch for every notebook, KVLAB_BUDGET=quick|full."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .about import best_device


@dataclass(frozen=True)
class Budget:
    """Sizes that the notebooks use, so that a laptop finishes in minutes and a GPU has something to do.

    lengths:     tokens in view, ascending: the x axis of every sweep over length.
    new_tokens:  how many tokens a generation writes.
    batches:     batch sizes of a sweep over batch.
    repeats:     readings behind each median.
    seconds:     most seconds that one sweep may take; what it does not reach is marked, never dropped.
    """

    name: str
    lengths: tuple[int, ...]
    new_tokens: int
    batches: tuple[int, ...]
    repeats: int
    seconds: float

    @property
    def max_length(self) -> int:
        return self.lengths[-1]


def _powers(first: int, last: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(first.bit_length() - 1, last.bit_length()))


# quick on a CPU still reaches 512 tokens, where a cached step is clearly cheaper; far below, caching hardly shows.
_SIZES = {
    ("quick", "cpu"): Budget("quick", _powers(32, 512), 32, (1, 2, 4), 3, 10.0),
    ("full", "cpu"): Budget("full", _powers(32, 2048), 128, (1, 2, 4, 8, 16), 5, 60.0),
    ("quick", "gpu"): Budget("quick", _powers(64, 1024), 32, (1, 4, 16), 3, 10.0),
    ("full", "gpu"): Budget("full", _powers(64, 8192), 256, (1, 4, 16, 64), 7, 60.0),
}


def budget(device=None) -> Budget:
    """The sizes for this run. KVLAB_BUDGET chooses "quick" or "full"; unset, it is full on a GPU and quick on a CPU.

    Raises ValueError for any other value of KVLAB_BUDGET.
    """
    device = torch.device(device) if device is not None else best_device()
    kind = "cpu" if device.type == "cpu" else "gpu"
    name = os.environ.get("KVLAB_BUDGET") or ("quick" if kind == "cpu" else "full")
    if (name, kind) not in _SIZES:
        raise ValueError(f"KVLAB_BUDGET={name!r} is no budget: set it to 'quick' or 'full', or unset it")
    return _SIZES[name, kind]
