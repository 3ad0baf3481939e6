"""Measure at many points without losing any: time ran out, memory ran out, and that is a result too."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvlab.progress import bar

OK, DID_NOT_FIT, OUT_OF_TIME = "ok", "did not fit", "not run: out of time"

# PyTorch raises OutOfMemoryError for CUDA; the allocators of CPU and Metal and the CUDA libraries say it in words.
_OOM_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")


@dataclass(frozen=True)
class Record:
    """One point of a sweep: its value, or why there is none. `seconds` is what the attempt took, 0.0 if not run."""

    point: object
    value: object
    status: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == OK


def sweep(
    points: Iterable,
    fn: Callable,
    *,
    seconds: float = 60.0,
    progress: bool = True,
    label: str = "",
    did_not_fit: tuple[type[BaseException], ...] = (),
) -> list[Record]:
    """Run `fn(point)` for each point: a list of Record, one for each point, in the order given.

    seconds:      no point starts after this many; the rest are kept with status "not run: out of time". The first
                  point always runs, and a point that has started is not cut off, so put the costly ones last.
    did_not_fit:  exceptions that mean "too large" besides out of memory, such as an exhausted pool.
    progress:     a bar of text while it runs, in a terminal or a notebook; none elsewhere.

    A point that runs out of memory keeps its place with status "did not fit", what it held is freed, and the sweep goes
    on. Any other exception is yours: it passes through.
    """
    points = list(points)
    if seconds <= 0:
        raise ValueError(f"seconds={seconds!r} must be greater than 0")
    records, start = [], time.perf_counter()
    with bar(len(points), label, progress) as shown:
        for point in points:
            began = time.perf_counter()
            if records and began - start >= seconds:
                records.append(Record(point, None, OUT_OF_TIME, 0.0))
                continue
            value, status = None, OK
            try:
                value = fn(point)
            except Exception as error:
                if not isinstance(error, did_not_fit) and not out_of_memory(error):
                    raise
                status = DID_NOT_FIT
            if status == DID_NOT_FIT:
                free()  # here, not above: until its handler ends, the exception's frames still hold the tensors
            records.append(Record(point, value, status, time.perf_counter() - began))
            shown.update()
    return records


def out_of_memory(error: BaseException) -> bool:
    """True if this exception says that memory ran out, on whichever device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _OOM_WORDS)


def free() -> None:
    """Give what nobody uses any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


@dataclass(frozen=True)
class Slope:
    """The exponent of a power law: y grows like x ** slope over `between`. `error` is one standard error."""

    slope: float
    error: float
    intercept: float
    between: tuple[float, float]
    points: int

    def __call__(self, x: float) -> float:
        """The fitted line, to draw over the points."""
        return math.exp(self.intercept) * x**self.slope

    def __str__(self):
        low, high = self.between
        return f"slope {self.slope:.2f} ± {self.error:.2f} ({self.points} points, {low:g} to {high:g})"


def fit_slope(x: Sequence[float], y: Sequence[float], between: tuple[float, float] | None = None) -> Slope:
    """Least-squares line through (log x, log y), over the points with between[0] <= x <= between[1] (None: all).

    Name the range in your figure: a slope without one says nothing, since small sizes measure overhead. Points whose y
    is None (did not fit, not run) are left out. Raises ValueError with fewer than 3 points or values that are not > 0.
    """
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} values and y has {len(y)}: need as many of each")
    low, high = between or (-math.inf, math.inf)
    pairs = [(float(a), float(b)) for a, b in zip(x, y) if b is not None and low <= a <= high]
    if any(not (0 < a < math.inf and 0 < b < math.inf) for a, b in pairs):
        raise ValueError("a log-log slope needs finite values greater than 0")
    n = len(pairs)
    if len({a for a, _ in pairs}) < 3:
        raise ValueError(f"{n} point(s) between {low:g} and {high:g}: a slope with an error needs 3 different x")
    u, v = [math.log(a) for a, _ in pairs], [math.log(b) for _, b in pairs]
    mean_u, mean_v = sum(u) / n, sum(v) / n
    spread = sum((a - mean_u) ** 2 for a in u)
    slope = sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v)) / spread
    intercept = mean_v - slope * mean_u
    residual = sum((b - intercept - slope * a) ** 2 for a, b in zip(u, v))
    between = (min(a for a, _ in pairs), max(a for a, _ in pairs))
    return Slope(slope, math.sqrt(residual / (n - 2) / spread), intercept, between, n)
