"""Time, measured so that it can be compared: warm up, synchronize, repeat, report the median with its spread.

A GPU call returns before its work is done, so the clock must wait for it: CUDA events bracket the work on the device
itself; MPS is read with perf_counter after a synchronize, a CPU with perf_counter alone. One repeat proves nothing on a
machine that others use: compare medians, look at the quartiles, and time rivals in turns (`interleaved`), so that a
slow second hits them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, in the order taken. All properties are seconds too."""

    times: tuple[float, ...]

    def __post_init__(self):
        if not self.times:
            raise ValueError("a Timing needs at least one repeat")

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def min(self) -> float:
        return min(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and third quartile: half of the repeats lie between them."""
        if len(self.times) == 1:
            return self.times * 2
        first, _, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return first, third

    def __str__(self):
        low, high = self.quartiles
        unit, scale = ("s", 1) if self.median >= 1 else ("ms", 1e3) if self.median >= 1e-3 else ("us", 1e6)
        return (
            f"{self.median * scale:.3g} {unit} (quartiles {low * scale:.3g} to {high * scale:.3g}, "
            f"min {self.min * scale:.3g}, {len(self.times)} repeats)"
        )


def time_call(fn: Callable[[], object], *, repeats: int = 5, warmup: int = 1, number: int = 1, device=None) -> Timing:
    """Seconds that `fn()` takes: `warmup` calls thrown away, then `repeats` readings of `number` calls each.

    device: where fn works ("cuda", "mps", "cpu"); None asks `best_device()`. The times are per call.
    """
    return interleaved({"": fn}, repeats=repeats, warmup=warmup, number=number, device=device)[""]


def interleaved(
    sides: Mapping[str, Callable[[], object]], *, repeats: int = 5, warmup: int = 1, number: int = 1, device=None
) -> dict[str, Timing]:
    """Time several functions in turns: {name: Timing}. Each round starts with another side, so none is always first."""
    _at_least("repeats", repeats, 1), _at_least("warmup", warmup, 0), _at_least("number", number, 1)
    clock = clock_on(device)
    names = list(sides)
    for _ in range(warmup):
        for name in names:
            clock(sides[name])
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]

            def calls(fn=sides[name]):
                for _ in range(number):
                    fn()

            times[name].append(clock(calls) / number)
    return {name: Timing(tuple(taken)) for name, taken in times.items()}


def clock_on(device) -> Callable[[Callable], float]:
    """A function that runs its argument once and returns the seconds the device needed."""
    if device is None:
        from .about import best_device

        device = best_device()
    device = torch.device(device)
    if device.type == "cuda":

        def clock(fn):
            with torch.cuda.device(device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                start.record()
                fn()
                end.record()
                end.synchronize()
                return start.elapsed_time(end) / 1e3
    else:
        wait = torch.mps.synchronize if device.type == "mps" else lambda: None

        def clock(fn):
            wait()
            start = time.perf_counter()
            fn()
            wait()
            return time.perf_counter() - start

    return clock


@dataclass(frozen=True)
class SampledSteps:
    """Times of single steps at a few lengths, and the whole generation integrated from them.

    lengths:  the sampled lengths, ascending; step L is the step that has L tokens in view.
    seconds:  the time of each sampled step.
    Everything between is interpolated on straight lines: exact where cost grows linearly, a little high where it grows
    faster. Draw `lengths` as points and the rest as a line, so that nobody takes the line for a measurement.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self):
        if len(self.lengths) != len(self.seconds) or not self.lengths:
            raise ValueError(
                f"{len(self.lengths)} lengths and {len(self.seconds)} times: need as many, and at least one"
            )
        if any(a >= b for a, b in zip(self.lengths, self.lengths[1:])):
            raise ValueError(f"lengths must ascend, got {list(self.lengths)}")

    def step(self, length: int) -> float:
        """Seconds of the step at `length`. Raises ValueError outside the sampled range: that would be a guess."""
        if not self.lengths[0] <= length <= self.lengths[-1]:
            raise ValueError(f"length {length} lies outside the sampled range {self.lengths[0]} to {self.lengths[-1]}")
        for i, right in enumerate(self.lengths):
            if length == right:
                return self.seconds[i]
            if length < right:
                left = self.lengths[i - 1]
                share = (length - left) / (right - left)
                return (1 - share) * self.seconds[i - 1] + share * self.seconds[i]

    def cumulative(self) -> tuple[list[int], list[float]]:
        """Every length of the range, and the seconds of all steps from the first up to and including it."""
        total, lengths, sums = 0.0, list(range(self.lengths[0], self.lengths[-1] + 1)), []
        for length in lengths:
            total += self.step(length)
            sums.append(total)
        return lengths, sums

    @property
    def total(self) -> float:
        """Seconds of all steps of the range."""
        return self.cumulative()[1][-1]

    @property
    def sampled(self) -> int:
        """How many of the steps were really run."""
        return len(self.lengths)


def time_steps(
    step: Callable[[int], object], lengths: Iterable[int], *, repeats: int = 3, warmup: int = 1, device=None
) -> SampledSteps:
    """Time `step(L)`, one step with L tokens in view, at the sampled `lengths`: the median of `repeats` at each.

    For the uncached variant, whose every step recomputes its L tokens: running all of them would take the time that
    this lab is about to show you need not spend.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 1:
        raise ValueError(f"lengths must be one or more numbers of at least 1, got {lengths}")
    times = [time_call(lambda n=n: step(n), repeats=repeats, warmup=warmup, device=device).median for n in lengths]
    return SampledSteps(tuple(lengths), tuple(times))


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
