"""What a step costs beside the model: the scheduler's decisions, the blocks and the trace, on a clock."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from kvlab.config import check_int
from kvlab.serving.engine import Engine


@dataclass(frozen=True)
class Bookkeeping:
    """Medians over decode steps."""

    num_seqs: int
    context: int  # tokens of each prompt
    steps: int
    schedule_seconds: float  # scheduler, block tables and trace
    step_seconds: float  # the whole step, the model in it

    @property
    def share(self) -> float:
        return self.schedule_seconds / self.step_seconds

    def __str__(self) -> str:
        return (
            f"{self.num_seqs} requests of {self.context} tokens, median of {self.steps} decode steps: "
            f"{1e6 * self.schedule_seconds:.0f} us of bookkeeping in {1e3 * self.step_seconds:.1f} ms, {self.share:.2%}"
        )


def bookkeeping(model, num_seqs: int = 16, context: int = 128, steps: int = 32, block_size: int = 16) -> Bookkeeping:
    """Time `steps` decode steps of num_seqs requests at once, after prompts of `context` tokens and two steps more."""
    for name, value in (("num_seqs", num_seqs), ("context", context), ("steps", steps), ("block_size", block_size)):
        check_int(name, value)
    blocks = num_seqs * -(-(context + steps + 4) // block_size)
    engine = Engine(model, blocks + num_seqs, block_size, max_num_batched_tokens=max(256, num_seqs))
    rng = torch.Generator().manual_seed(0)
    for _ in range(num_seqs):
        ids = torch.randint(model.config.vocab_size, (context,), generator=rng).tolist()
        engine.add(ids, steps + 4, stop_ids=[])
    while any(r.num_tokens - r.num_computed_tokens > 1 for r in engine.scheduler.requests.values()):
        engine.step()
    engine.run(2)
    schedule, whole = [], []
    for _ in range(steps):
        before, start = engine.seconds["schedule"], perf_counter()
        engine.step()
        whole.append(perf_counter() - start)
        schedule.append(engine.seconds["schedule"] - before)
    return Bookkeeping(num_seqs, context, steps, median(schedule), median(whole))
