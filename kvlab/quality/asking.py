"""Recall: is a fact that was read some way back still there? recall() asks, Recall holds the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import NotOffered, PoolExhausted
from kvlab.config import check_int
from kvlab.measure.sweep import bar

from .facts import FACT, QUESTION, Texts
from .result import Spread, bootstrap, wilson
from .specs import cache_from, caches_from
from .streamed import log_probs


@dataclass(frozen=True, eq=False)
class Recall:
    """One cache's answers. distances: ascending; logprob, exact: (distances, seeds).

    distances: from the fact's number to the query that must produce it: seen directly by a window of distance + 1.
    fact_end:  from the fact's last token (its line break) to that query, for each distance.
    logprob:   nats, mean over the number's tokens, each given the right ones before it.
    exact:     greedy decoding writes exactly the number.
    """

    name: str
    distances: tuple[int, ...]
    fact_end: tuple[int, ...]
    logprob: Tensor
    exact: Tensor

    @property
    def share(self) -> list[float]:
        """Share of the seeds answered exactly, per distance."""
        return self.exact.double().mean(1).tolist()

    @property
    def share_spread(self) -> list[Spread]:
        """The same with its 95% interval over seeds (Wilson's)."""
        return [wilson(int(row.sum()), len(row)) for row in self.exact]

    @property
    def probability(self) -> list[float]:
        """Probability of the right token, per distance: geometric mean over the answer, mean over seeds."""
        return self.logprob.exp().mean(1).tolist()

    @property
    def probability_spread(self) -> list[Spread]:
        """The same with its 95% interval, from a bootstrap over seeds."""
        return [bootstrap(row[:, None], block=1) for row in self.logprob.exp()]

    def __str__(self):
        lines = [f"{self.name} ({self.exact.shape[1]} seeds)", "distance  exact  95% interval  p(right token)"]
        for d, s, p in zip(self.distances, self.share_spread, self.probability):
            lines.append(f"{d:8d}  {s.value:5.0%}  {s.low:4.0%} to {s.high:4.0%}  {p:14.3f}")
        return "\n".join(lines)


def recall(
    model,
    tokenizer,
    cache,
    distances,
    seeds=range(8),
    *,
    lead: int = 64,
    chunk: int = 64,
    fact: str = FACT,
    question: str = QUESTION,
    filler: str | None = None,
    progress: bool = True,
):
    """Ask for a fact at each of `distances` through `cache`: a Recall, or {name: Recall} for a dict of caches.

    cache:     a spec as in evaluate(), or a dict of them. One cache and many distances, or many windows and one
               distance: both curves of recall against window.
    distances: tokens from the fact's number to the query that must produce it (see facts.py): an int or several.
    seeds:     each has its own place, number and stretch of filler; all of them are rows of one batch.
    lead:      filler tokens before the fact, so that it does not lie among the sinks.
    chunk:     tokens of a row fed at once; the answer is fed token by token.
    fact, question: texts with {place}; the fact has {number}, and the question ends where " {number}" must follow.
    filler:    the text between; default: topics of the standard library's help, from a place drawn by seed.
    The text is read once, up to the longest distance; at each shorter one a fork of the cache is asked. A cache that
    cannot fork reads it anew.
    Raises ValueError for a distance too short for fact and question or too long for the model; each names the value.
    """
    texts = Texts(model, tokenizer, distances, seeds, lead, fact, question, filler)
    check_int("chunk", chunk)
    several = isinstance(cache, Mapping)
    name = cache if isinstance(cache, str) else cache[0] if isinstance(cache, tuple) and cache else "cache"
    specs = cache if several else {name: cache}
    caches_from(specs, model, len(texts.seeds), texts.length)  # one that does not fit is found before any runs
    found = {}
    with bar(len(specs) * len(texts.distances), "recall", progress) as shown, torch.no_grad():
        for name, spec in specs.items():
            found[name] = _recall_one(model, name, spec, texts, chunk, shown.update)
    return found if several else found[name]


def _recall_one(model, name: str, spec, texts: Texts, chunk: int, tick) -> Recall:
    logprobs, exact, fed, cache = [], [], 0, None
    for distance in texts.distances:
        if cache is None:
            cache, fed = cache_from(spec, model, len(texts.seeds), texts.length, name), 0
        cut = texts.cut(distance)
        _feed(model, texts.stream[:, fed:cut], cache, chunk)
        fed = cut
        answers = None if distance == texts.distances[-1] else _ask_fork(model, texts, cache, chunk)
        if answers is None:
            answers = _ask(model, texts, cache, chunk)
            cache = None  # used up: a further distance begins with a new one
        logprobs.append(answers[0])
        exact.append(answers[1])
        tick()
    ends = tuple(d - texts.tail + 1 for d in texts.distances)
    return Recall(name, tuple(texts.distances), ends, torch.stack(logprobs), torch.stack(exact))


def _feed(model, ids: Tensor, cache, chunk: int) -> Tensor | None:
    """Chunk by chunk -> logits of the last token (B, vocab)."""
    logits = None
    for part in ids.split(chunk, 1):
        if part.shape[1]:
            logits = model(part, cache, logits_to_keep=1)[:, -1]
    return logits


def _ask_fork(model, texts: Texts, cache, chunk: int):
    """As _ask(), which leaves `cache` as it was; None where that cannot be."""
    try:
        return _ask(model, texts, cache.fork(), chunk)
    except (NotOffered, PoolExhausted):
        return None


def _ask(model, texts: Texts, cache, chunk: int) -> tuple[Tensor, Tensor]:
    """The question, then the answer token by token -> mean log-probability (B,), answered exactly (B,).

    The right token is fed whatever was likeliest: greedy decoding writes the whole number just if each right token is
    the likeliest one after the right ones before it.
    """
    logits, logprob, right = _feed(model, texts.question, cache, chunk), 0.0, True
    for i in range(texts.answer.shape[1]):
        token = texts.answer[:, i : i + 1]
        if i:
            logits = model(texts.answer[:, i - 1 : i], cache, logits_to_keep=1)[:, -1]
        logprob = logprob + log_probs(logits).gather(1, token)[:, 0]
        right = right & (logits.argmax(-1, keepdim=True) == token)[:, 0]
    return (logprob / texts.answer.shape[1]).cpu().double(), right.cpu()  # Metal has no float64
