"""Paging against reservation on a clock: one model, one workload, one memory, two engines that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.config import check_int
from kvlab.measure.timing import clock_on
from kvlab.progress import bar
from kvlab.serving.engine import Engine
from kvlab.serving.simulation import Feed, check_lengths
from kvlab.workloads import Arrival


@dataclass
class Side:
    """One engine and its own clock. `seconds` has one entry a step; outputs are the tokens of each request."""

    name: str
    engine: Engine
    feed: Feed
    seconds: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.seconds)

    @property
    def outputs(self) -> dict[str, list[int]]:
        return {r.id: r.output for r in self.engine.scheduler.requests.values()}

    def to_dict(self) -> dict:
        """Counts, and seconds measured; tokens are the new ones of all requests."""
        steps, tokens = len(self.seconds), sum(map(len, self.outputs.values()))
        running = self.engine.trace.series()["running"]
        return {
            "name": self.name,
            "model_steps": steps,
            "mean_requests": float(running.mean()),
            "peak_requests": int(running.max()),
            "tokens": tokens,
            "tokens_per_step": tokens / steps,
            "seconds": self.total,
            "ms_per_step": 1e3 * self.total / steps,
            "tokens_per_second": tokens / self.total,
        }


def time_rivals(
    model,
    arrivals: Sequence[Arrival],
    num_slots: int,
    *,
    block_size: int = 16,
    max_model_len: int = 1024,
    max_num_batched_tokens: int = 256,
    progress: bool = True,
) -> list[Side]:
    """Serve `arrivals` with the model, paged and reserved, in num_slots slots each -> the two sides, measured.

    Both engines run the same code on the same blocks; reservation differs in what it admits: no more requests at once
    than have max_model_len slots each. (So it is spared any cost of its own, and every difference is one of how many
    run together.) The side whose clock is behind moves next, so that a slow minute of the machine hits both.
    Raises ValueError if there is no request, if none fits, or one is longer than max_model_len.
    """
    sizes = {"num_slots": num_slots, "block_size": block_size, "max_model_len": max_model_len}
    for name, value in {**sizes, "max_num_batched_tokens": max_num_batched_tokens}.items():
        check_int(name, value)
    if not arrivals:
        raise ValueError("arrivals is empty: there is nothing to time")
    rows = min(num_slots // max_model_len, max_num_batched_tokens)  # each decodes one token a step
    if rows < 1 or num_slots < block_size:
        raise ValueError(
            f"{num_slots} slots have no room for one request of {max_model_len=} in blocks of {block_size}"
        )
    check_lengths(arrivals, max_model_len)
    sides = []
    for name, seqs in ((f"paged-{block_size}", None), ("reserved", rows)):
        engine = Engine(
            model,
            num_slots // block_size,
            block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=seqs,
            prefix_sharing=False,
            headroom=0,
        )
        sides.append(Side(name, engine, Feed(engine, arrivals, model.config.vocab_size)))
    clock, ended = clock_on(model.device), 0
    warm = Engine(model, 4, 16)
    warm.add([0] * 24, 4)
    warm.run()
    with bar(2 * len(arrivals), "paged against reserved", progress) as shown:
        going = list(sides)
        while going:
            side = min(going, key=lambda s: s.total)
            if not side.feed.add_due():
                going.remove(side)
                continue
            side.seconds.append(clock(side.engine.step))
            now = sum(s.engine.scheduler.num_finished for s in sides)
            shown.update(now - ended)
            ended = now
    return sides
