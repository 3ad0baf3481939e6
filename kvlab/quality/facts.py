"""Texts in which a number is told, something else follows, and the number is asked for. All is exact in tokens.

    [lead: filler] "The secret code of the harbour is 4827." [filler] "Question: ... The secret code of ... is 4827"
                                                      ^ key                                                   ^ query

The distance is the query's position minus the key's: the query is the position that must produce the first digit of the
answer, the key the first digit in the fact. It is the same for every other digit. So a window of W keys, the query's
own included, sees the very digit just if distance <= W - 1, and n layers can hand it on over n(W - 1) at most.

The text ends where the number must follow, since there a small model is most reliable: it copies what once followed the
same words. Ids of the pieces are joined, never tokenized again. Related: passkey retrieval (arXiv 2305.16300).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from kvlab.config import check_int
from kvlab.words import kind_of

PLACES = ("harbour", "castle", "library", "garden", "station", "museum", "market", "bridge", "tower", "school", "hotel")
FACT = "The secret code of the {place} is {number}.\n"
QUESTION = "\n\nQuestion: What is the secret code of the {place}?\nAnswer: The secret code of the {place} is"
DIGITS = 4
TOPICS = ("objects", "exceptions", "import")


class Texts:
    """One row per seed, each with its own place, number and stretch of filler, all of one length.

    stream:   (B, ...) lead, fact and filler up to the longest distance; question (B, Q) and answer (B, A) go behind.
    key:      the position of the fact's first digit.
    tail:     tokens of the fact from there on.
    """

    def __init__(self, model, tokenizer, distances, seeds, lead: int, fact: str, question: str, filler: str | None):
        self.distances = _ints("distances", [distances] if isinstance(distances, int) else distances)
        self.seeds = _ints("seeds", seeds)
        for d in self.distances:
            check_int("distance", d, 0)
        check_int("lead", lead, 0)
        self.distances = sorted(set(self.distances))
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        between = encode(_default_filler() if filler is None else filler)
        if not between:
            raise ValueError(f"filler={filler!r} has no tokens: give it some text")
        begin = tokenizer.encode("")  # what the model wants in front of every text, if anything
        draws, places = [random.Random(seed) for seed in self.seeds], _alike(encode, fact, question)
        rows = []
        for draw in draws:
            rows.append(_draw_fact(draw, encode, places, fact, question))
            while [*map(len, rows[-1])] != [*map(len, rows[0])]:  # where numbers differ in tokens: all as the first
                rows[-1] = _draw_fact(draw, encode, places, fact, question)
        heads, tails, questions, answers = zip(*rows)
        need, streams = lead + self.distances[-1], []
        for draw, head, tail in zip(draws, heads, tails):
            start = draw.randrange(len(between))
            around = (between[start:] + between * (need // len(between) + 1))[:need]
            streams.append(begin + around[:lead] + head + tail + around[lead:])
        self.stream, self.question, self.answer = (
            torch.tensor(x, device=model.device) for x in (streams, questions, answers)
        )
        self.key, self.tail = len(begin) + lead + len(heads[0]), len(tails[0])
        self._check_fits(model, lead)

    def _check_fits(self, model, lead: int) -> None:
        shortest, longest = self.tail + self.question.shape[1] - 1, self.distances[-1]
        if self.distances[0] < shortest:
            raise ValueError(f"distance {self.distances[0]} is too short: fact and question alone take {shortest}")
        most = model.config.max_position_embeddings
        if self.length > most:
            raise ValueError(f"distance {longest} and lead {lead} make {self.length} tokens; the model takes {most}")

    @property
    def length(self) -> int:
        """Tokens that the cache sees at most: the answer's last one is not fed back."""
        return self.row(self.distances[-1]).shape[1] - 1

    def cut(self, distance: int) -> int:
        """Tokens of the stream before the question, so that the query's position is key + distance."""
        return self.key + distance + 1 - self.question.shape[1]

    def row(self, distance: int) -> Tensor:
        """All tokens (B, ...) of the text with this distance, the answer included."""
        return torch.cat((self.stream[:, : self.cut(distance)], self.question, self.answer), 1)


def _draw_fact(draw: random.Random, encode, places, fact: str, question: str) -> tuple[list[int], ...]:
    """Ids of the fact before its number and from it on, of the question before the number, and of the number."""
    place, number = draw.choice(places), str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))
    told, asked = (encode(text.split("{number}")[0].format(place=place).rstrip(" ")) for text in (fact, question))
    answer = encode(f"{question.format(place=place)} {number}")[len(asked) :]
    whole = encode(fact.format(place=place, number=number))
    skip = 1 if len(answer) > 1 and answer[:1] == encode(" ") else 0  # a space of its own is no part of the number
    key = len(told) + skip
    if whole[key : key + len(answer) - skip] != answer[skip:]:
        raise ValueError(f"this tokenizer cuts {number} differently in fact and question: change their wording")
    return whole[:key], whole[key:], asked + answer[:skip], answer[skip:]


def _alike(encode, fact: str, question: str) -> list[str]:
    """Places whose fact and question take equally many tokens: as many of them as there are."""
    for text, name in ((fact, "fact"), (question, "question")):
        if "{place}" not in text or ("{number}" in text) != (name == "fact"):
            raise ValueError(
                f"{name}={text!r} must contain {{place}}" + " and {number}" * (name == "fact") + ", no more"
            )
    size = {p: tuple(len(encode(text.format(place=p, number=1000))) for text in (fact, question)) for p in PLACES}
    (common, _), *_ = Counter(size.values()).most_common(1)
    return [p for p in PLACES if size[p] == common]


def _ints(name: str, values) -> list[int]:
    if isinstance(values, (str, int)) or not isinstance(values, Iterable):
        raise TypeError(f"{name}={values!r} is {kind_of(values)}; it must hold ints, as range(8) does")
    values = list(values)
    if not values:
        raise ValueError(f"{name} is empty: name at least one")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} holds {value!r}, which is no int")
    return values


def _default_filler() -> str:
    from kvlab.pretrained import sample_text

    return sample_text(TOPICS)
