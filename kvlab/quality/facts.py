"""Recall: is a fact that was read some way back still there? A number is hidden in a text and asked for.

What a row of tokens looks like (all pieces exact in tokens, ids joined and never tokenized again):

    [lead filler] "The secret code of the harbour is 4827." [filler] "Question: ... The secret code of ... is 4827"
                                                    ^ key                                                  ^ query

The distance is the query's position minus the key's: the position that must produce the first digit of the answer, and
the first digit in the fact. It is the same for every other digit, so a window of W keys, the query's own included, sees
the fact directly just if distance <= W - 1, and n layers can hand it on over n(W - 1) at most.
Plain text that ends where the number must follow, since there a small model is most reliable: it copies what once
followed the same words. Related: passkey retrieval (Landmark Attention, arXiv 2305.16300).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import NotOffered, PoolExhausted
from kvlab.config import check_int
from kvlab.measure.sweep import bar

from .result import Spread, bootstrap, wilson
from .specs import cache_from, caches_from

PLACES = ("harbour", "castle", "library", "garden", "station", "museum", "market", "bridge", "tower", "school", "hotel")
FACT = "The secret code of the {place} is {number}.\n"
QUESTION = "\n\nQuestion: What is the secret code of the {place}?\nAnswer: The secret code of the {place} is"
DIGITS = 4


@dataclass(frozen=True)
class Recall:
    """One cache's answers. distances: as asked, ascending; logprob, exact: (distances, seeds).

    logprob:  nats, mean over the answer's tokens, each given the right ones before it.
    exact:    greedy decoding writes exactly the number.
    fact_end: tokens from the fact's last token (its line break) to the query, per distance.
    """

    name: str
    distances: tuple[int, ...]
    logprob: Tensor
    exact: Tensor
    fact_end: tuple[int, ...]

    @property
    def share(self) -> list[float]:
        """Share of the seeds answered exactly, per distance."""
        return self.exact.double().mean(1).tolist()

    @property
    def share_spread(self) -> list[Spread]:
        """The same with its 95% interval over seeds (Wilson's, for a share of few)."""
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
        lines = [f"{self.name}: {self.exact.shape[1]} seeds", "distance  exact  (95%)            p(right token)"]
        for d, s, p in zip(self.distances, self.share_spread, self.probability):
            lines.append(f"{d:8d}  {s.value:5.0%}  ({s.low:4.0%} to {s.high:4.0%})  {p:14.3f}")
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
    distances: tokens from the fact's number to the query that must produce it (see the top of this file).
    seeds:     each has its own place, number and stretch of filler; all seeds of a call are rows of one batch.
    lead:      filler tokens before the fact, so that it lies behind the sinks.
    fact, question: texts with {place} and {number}; the question ends where " {number}" must follow.
    filler:    text between; default: topics of the standard library's help, from a place drawn by seed.
    The text is read once, up to the longest distance: at each shorter one a fork of the cache is asked. A cache that
    cannot fork reads it anew.
    Raises ValueError for a distance too short for the question or too long for the model; each names the value.
    """
    texts = Texts(model, tokenizer, distances, seeds, lead, fact, question, filler)
    check_int("chunk", chunk)
    several = isinstance(cache, Mapping)
    specs = dict(cache) if several else {cache if isinstance(cache, str) else "cache": cache}
    caches_from(specs, model, len(texts.seeds), texts.length)  # any that does not fit is found before one runs
    found = {}
    with bar(len(specs) * len(texts.distances), "recall", progress) as shown, torch.no_grad():
        for name, spec in specs.items():
            found[name] = _recall_one(model, str(name), spec, texts, chunk, shown.update)
    return found if several else found[next(iter(found))]


class Texts:
    """The rows of token ids: stream (B, ...) is lead, fact and filler; question (B, Q) and answer (B, A) go behind."""

    def __init__(self, model, tokenizer, distances, seeds, lead, fact, question, filler):
        distances = [distances] if isinstance(distances, int) else list(distances)
        self.seeds = list(seeds) if not isinstance(seeds, int) else [seeds]
        if not distances or not self.seeds:
            raise ValueError("distances and seeds must each name at least one")
        for d in distances:
            check_int("distance", d, 0)
        check_int("lead", lead, 0)
        self.distances = sorted(set(distances))
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        begin = tokenizer.encode("")  # what the model wants in front of every text, if anything
        filler = encode(_default_filler() if filler is None else filler)
        if not filler:
            raise ValueError("filler is empty: give it some text")
        places = _alike(encode, fact, question)
        streams, heads, tails, questions, answers = [], [], [], [], []
        for seed in self.seeds:
            rng = random.Random(seed)
            while True:  # with some tokenizers numbers differ in tokens: all rows take as many as the first
                place, number = rng.choice(places), str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
                parts = _pieces(encode, fact, question, place, number)
                if not answers or all(len(a) == len(b[0]) for a, b in zip(parts, (heads, tails, questions, answers))):
                    break
            head, tail, ask, answer = parts
            if not answers:
                heads, tails = [head], [tail]
            start = rng.randrange(len(filler))
            need = lead + max(self.distances)
            around = (filler[start:] + filler * (need // len(filler) + 1))[:need]
            streams.append(begin + around[:lead] + head + tail + around[lead:])
            questions.append(ask)
            answers.append(answer)
        device = model.device
        self.stream, self.question, self.answer = (
            torch.tensor(x, device=device) for x in (streams, questions, answers)
        )
        self.key = len(begin) + lead + len(heads[0])  # the position of the fact's first digit
        self.tail, Q, A = len(tails[0]), self.question.shape[1], self.answer.shape[1]
        shortest = self.tail + Q - 1
        if self.distances[0] < shortest:
            raise ValueError(f"distance {self.distances[0]} is too short: fact and question alone take {shortest}")
        self.length = self.cut(self.distances[-1]) + Q + A - 1
        most = model.config.max_position_embeddings
        if self.length > most:
            raise ValueError(
                f"distance {self.distances[-1]} and lead {lead} make {self.length} tokens; the model was made for {most}"
            )

    def cut(self, distance: int) -> int:
        """Tokens of the stream before the question, so that the query's position is key + distance."""
        return self.key + distance + 1 - self.question.shape[1]

    def row(self, distance: int) -> Tensor:
        """All tokens (B, ...) from the first to the last of the answer."""
        return torch.cat((self.stream[:, : self.cut(distance)], self.question, self.answer), 1)


def _default_filler() -> str:
    from kvlab.pretrained import sample_text

    return sample_text(("objects", "exceptions", "import"))


def _pieces(encode, fact: str, question: str, place: str, number: str):
    """The fact's ids before the number and from it on, the question's before the number, and the number's."""
    told, asked = fact.split("{number}")[0].format(place=place).rstrip(" "), question.format(place=place).rstrip(" ")
    told_ids, asked_ids = encode(told), encode(asked)
    answer = encode(f"{asked} {number}")[len(asked_ids) :]
    whole = encode(fact.format(place=place, number=number))
    skip = 1 if len(answer) > 1 and answer[0] == encode(" ")[0] else 0  # a space of its own is no part of the answer
    key = len(told_ids) + skip
    if whole[key : key + len(answer) - skip] != answer[skip:]:
        raise ValueError(
            f"this tokenizer cuts {number!r} differently in the fact and in the answer: change their wording"
        )
    return whole[:key], whole[key:], asked_ids + answer[:skip], answer[skip:]


def _alike(encode, fact: str, question: str) -> list[str]:
    """The places whose fact and question take equally many tokens, so that all rows have one length."""
    size = {
        p: (len(encode(fact.split("{number}")[0].format(place=p))), len(encode(question.format(place=p))))
        for p in PLACES
    }
    common = Counter(size.values()).most_common(1)[0][0]
    return [p for p in PLACES if size[p] == common]


def _recall_one(model, name: str, spec, texts: Texts, chunk: int, tick) -> Recall:
    logprobs, exact, fed = [], [], 0
    new = lambda: cache_from(spec, model, len(texts.seeds), texts.length, name)  # noqa: E731
    cache = new()
    for distance in texts.distances:
        cut = texts.cut(distance)
        _feed(model, texts.stream[:, fed:cut], cache, chunk)
        fed = cut
        if distance == texts.distances[-1]:
            said = _ask(model, texts, cache, chunk)
        else:
            try:
                said = _ask(model, texts, cache.fork(), chunk)
            except (NotOffered, PoolExhausted):
                said = _ask(model, texts, cache, chunk)
                cache, fed = new(), 0
        logprobs.append(said[0])
        exact.append(said[1])
        tick()
    ends = tuple(d - texts.tail + 1 for d in texts.distances)
    return Recall(name, tuple(texts.distances), torch.stack(logprobs), torch.stack(exact), ends)


def _feed(model, ids: Tensor, cache, chunk: int) -> Tensor | None:
    """Chunk by chunk -> logits of the last token (B, vocab)."""
    logits = None
    for part in ids.split(chunk, 1):
        if part.shape[1]:
            logits = model(part, cache, logits_to_keep=1)[:, -1]
    return logits


def _ask(model, texts: Texts, cache, chunk: int) -> tuple[Tensor, Tensor]:
    """The question, then the answer token by token -> mean log-probability (B,), answered exactly (B,).

    The right token is fed whatever was likeliest: greedy decoding writes the whole number just if each right token is
    the likeliest after the right ones before it.
    """
    logits, logprob, right = _feed(model, texts.question, cache, chunk), 0.0, True
    for i in range(texts.answer.shape[1]):
        token = texts.answer[:, i : i + 1]
        logprob = logprob + logits.float().log_softmax(-1).gather(1, token)[:, 0]
        right = right & (logits.argmax(-1, keepdim=True) == token)[:, 0]
        if i + 1 < texts.answer.shape[1]:
            logits = model(token, cache, logits_to_keep=1)[:, -1]
    return (logprob / texts.answer.shape[1]).double().cpu(), right.cpu()
