"""The notebooks' exercises: check_answer("01.1", answer) says what is wrong in words, hint("01.1") helps step by step.

The exercises themselves stand in exercise_list.py; a new one is one more entry there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.exercise_kinds import Blank
from kvlab.exercise_list import EXERCISES


class Text(str):
    """A str that a notebook shows as it reads, without quotes."""

    __repr__ = str.__str__


@dataclass(frozen=True, repr=False)
class Verdict:
    """What check_answer returns. ok: right or not; messages: why, one sentence each; answered: False for a blank."""

    id: str
    ok: bool
    messages: tuple[str, ...]
    answered: bool = True

    def __repr__(self):
        word = "right" if self.ok else "not yet" if self.answered else "to do"
        return f"{self.id}: {word}. " + " ".join(self.messages)

    __str__ = __repr__

    def __bool__(self):
        return self.ok

    def raise_if_wrong(self) -> Verdict:
        """The verdict itself if it is ok; AssertionError otherwise."""
        if not self.ok:
            raise AssertionError(repr(self))
        return self


def check_answer(id: str, answer: Any = None) -> Verdict:
    """Check an answer to exercise `id`. The result shows itself in words; `.ok` is True or False.

    ... or None stands for "not answered yet" and gets guidance. Raises ValueError for an unknown id alone.
    """
    exercise = _exercise(id)
    todo = f"{exercise.title} Put your answer in place of the dots; kvlab.hint({id!r}) helps one step at a time."
    if answer is None or answer is ...:
        return Verdict(id, False, (todo,), answered=False)
    try:
        ok, messages = exercise.check(answer)
    except Blank as blank:
        return Verdict(id, False, (str(blank), f"kvlab.hint({id!r}) helps one step at a time."), answered=False)
    return Verdict(id, ok, tuple(messages))


_given: dict[str, int] = {}  # exercise -> hints given so far


def hint(id: str, restart: bool = False) -> Text:
    """The next hint for exercise `id`, one step further at each call; restart=True begins again."""
    hints = _exercise(id).hints
    n = 0 if restart else _given.get(id, 0)
    if n >= len(hints):
        return Text(
            f"{id}: no more hints, you have had all {len(hints)}. kvlab.hint({id!r}, restart=True) begins again."
        )
    _given[id] = n + 1
    return Text(f"{id}, hint {n + 1} of {len(hints)}: {hints[n]}")


def _exercise(id: str):
    if not isinstance(id, str) or id not in EXERCISES:
        raise ValueError(f"there is no exercise {id!r}; there are {', '.join(EXERCISES)}")
    return EXERCISES[id]
