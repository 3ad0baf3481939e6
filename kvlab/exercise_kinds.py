"""The kinds of exercise: a number, a function tried on cases, a cache. Each says in words what is wrong with an answer.

check(given) -> (right or not, [sentences]); it raises Blank where the answer has not been written yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.words import kind_of


class Blank(Exception):
    """The exercise has not been answered."""


@dataclass(frozen=True)
class Number:
    """The answer is one number. mistakes: (value, sentence) pairs, computed when asked. tolerance: absolute."""

    title: str
    answer: Callable[[], float]
    well_done: str
    hints: tuple[str, ...]
    mistakes: Callable[[], list[tuple[float, str]]] = list
    unit: str = ""
    tolerance: float = 0

    def check(self, given) -> tuple[bool, list[str]]:
        value = _as_number(given)
        if value is None:
            return False, [f"The answer is a number; you gave {_kind(given)}."]
        if math.isnan(value):
            return False, ["The answer is a number; you gave nan, the result of a calculation without one."]
        truth = self.answer()
        if abs(value - truth) <= self.tolerance:
            return True, [self.well_done]
        for wrong, sentence in self.mistakes():
            if wrong != truth and abs(value - wrong) <= max(self.tolerance, 1e-9 * abs(wrong)):
                return False, [f"{_show(value)} {self.unit}".strip() + f": {sentence}"]
        size = "too large" if value > truth else "too small"
        if value <= 0 < truth:
            size = "not possible: it must be greater than 0"
        elif not 0.02 < value / truth < 50:
            size += " by far"
        return False, [f"{_show(value)} {self.unit}".strip() + f" is {size}."]


@dataclass(frozen=True)
class Function:
    """The answer is a function, tried on cases. names: what each number of its result is called.

    mistakes: (function, sentence) pairs: a wrong function that fits all of the reader's results, or all values of one
    number, explains them. confusions: the same, where only the whole result counts (numbers swapped, say).
    """

    title: str
    signature: str
    names: tuple[str, ...]
    cases: tuple[tuple, ...]
    answer: Callable[..., tuple]
    well_done: str
    hints: tuple[str, ...]
    mistakes: tuple[tuple[Callable[..., tuple], str], ...] = ()
    confusions: tuple[tuple[Callable[..., tuple], str], ...] = ()

    def check(self, given) -> tuple[bool, list[str]]:
        if not callable(given):
            return False, [f"The answer is the function {self.signature} itself; you gave {_kind(given)}."]
        name, results = self.signature.split("(")[0], []
        for case in self.cases:
            call = f"{name}({', '.join(map(str, case))})"
            try:
                result = given(*case)
            except Exception as error:
                return False, [f"{call} raised {type(error).__name__}: {error}."]
            values = result if isinstance(result, (tuple, list)) else (result,)
            if any(v is None or v is ... for v in values):
                raise Blank(f"{call} returns no number yet: write {self.signature}.")
            if len(values) != len(self.names) or any(_as_number(v) is None for v in values):
                return False, [f"{call} must return {' and '.join(self.names)}, not {result!r}."]
            results.append(tuple(_as_number(v) for v in values))
        truths = [tuple(self.answer(*case)) for case in self.cases]
        if results == truths:
            return True, [self.well_done]
        for wrong, sentence in self.confusions + self.mistakes:
            if results == [tuple(wrong(*case)) for case in self.cases]:
                return False, [sentence[0].upper() + sentence[1:]]
        for i, part in enumerate(self.names):  # one of the numbers may be right, or wrong in a known way
            column, right = [r[i] for r in results], [t[i] for t in truths]
            if column == right:
                continue
            for wrong, sentence in self.mistakes:
                if column == [tuple(wrong(*case))[i] for case in self.cases]:
                    return False, [f"{part[0].upper()}{part[1:]}: {sentence}"]
            at = next(k for k, (a, b) in enumerate(zip(column, right)) if a != b)
            call = f"{name}({', '.join(map(str, self.cases[at]))})"
            return False, [f"{call} gives {_show(column[at])} for {part}; counted were {_show(right[at])}."]
        raise AssertionError("unreachable: results differ from the truths in no column")


@dataclass(frozen=True)
class CacheClass:
    """The answer is a cache: a class that needs no arguments, whose append(layer, k, v, pos) returns a View."""

    title: str
    well_done: str
    hints: tuple[str, ...]
    expect: object = "exact"

    def check(self, given) -> tuple[bool, list[str]]:
        import torch

        from kvlab.check import check_cache

        if not isinstance(given, type):
            return False, [f"The answer is the class itself, without brackets; you gave {_kind(given)}."]
        try:
            cache = given()
            view = cache.append(0, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), torch.tensor([[0, 1]]))
        except Exception as error:
            return False, [f"{given.__name__}().append(layer, k, v, pos) raised {type(error).__name__}: {error}."]
        if view is None or view is ...:
            raise Blank(
                f"{given.__name__}.append returns nothing yet: it must return kvlab.View(keys, values, positions)."
            )
        report = check_cache(lambda model, batch_size, max_length: given(), expect=self.expect)
        return report.ok, [self.well_done] if report.ok else list(report.messages)


# ---- small things --------------------------------------------------------------------------------------------------


def _as_number(x) -> float | int | None:
    """x as a Python number, or None. Tensors and numpy numbers of one element count; bools and strings do not."""
    if hasattr(x, "item") and getattr(x, "size", None) is not None:
        try:
            x = x.item()
        except (ValueError, RuntimeError):  # more than one element
            return None
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        return None
    return x if not abs(x) > 1e300 else math.inf if x > 0 else -math.inf  # an int may be too large for a float


def _kind(x) -> str:
    if isinstance(x, str):
        return f"the text {x!r}; leave out the quotes"
    if callable(x):
        return f"{kind_of(x)} ({getattr(x, '__name__', 'nameless')}); call it first"
    return kind_of(x)


def _show(x) -> str:
    return str(x) if not math.isfinite(x) else f"{x:,.0f}" if x == int(x) else f"{x:,.4g}"
