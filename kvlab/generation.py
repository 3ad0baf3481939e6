"""generate() and stream(): prefill the prompt, then decode token by token, with any cache or none.

No forward pass is wasted: n new tokens take one prefill and n - 1 decode steps; the last token is never fed back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.caches.adopt import adopt
from kvlab.caches.base import CacheFull, KVCache
from kvlab.config import check_int


@dataclass
class NewTokens:
    """One step of a generation. tokens[b] is row b's new token, or None if the row has finished earlier."""

    index: int  # 0 for the step that the prefill gives
    tokens: list[int | None]
    finished: list[bool]

    @property
    def token(self) -> int | None:
        """The new token of a batch of one."""
        return self.tokens[0]


@dataclass
class Sampler:
    """How to choose the next token. temperature 0 is greedy.

    Each row draws from its own generator, seeded by (seed, row): its text does not depend on its neighbours.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self):
        number = (int, float)
        if not isinstance(self.temperature, number) or not self.temperature >= 0:  # NaN is not
            raise ValueError(f"temperature={self.temperature!r} must be 0 (greedy) or more")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ValueError(f"top_k={self.top_k!r} must be at least 1, or None for all tokens")
        if self.top_p is not None and (not isinstance(self.top_p, number) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must lie in (0, 1], or be None")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"seed={self.seed!r} must be an int, or None for another text each time")
        self.generators: dict[int, torch.Generator] = {}

    def probabilities(self, logits: Tensor) -> Tensor:
        """Next-token probabilities (B, vocab) after temperature, top-k and top-p (nucleus, arXiv 1904.09751)."""
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probs = logits.softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = probs.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens: the likeliest one always stays
            probs = probs.scatter(-1, index, ordered.masked_fill(before >= self.top_p, 0))
        return probs

    def __call__(self, logits: Tensor, rows: list[int]) -> list[int]:
        """logits (B, vocab) of these rows -> a token each."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        probs = self.probabilities(logits.float())
        return [int(torch.multinomial(p, 1, generator=self._generator(row, p.device))) for p, row in zip(probs, rows)]

    def _generator(self, row: int, device) -> torch.Generator:
        if row not in self.generators:
            if self.seed is None:  # another text each time, and the same one again after torch.manual_seed
                self.seed = int(torch.randint(2**62, ()))
            seed = (self.seed + 0x9E3779B97F4A7C15 * (row + 1)) % 2**63
            self.generators[row] = torch.Generator(device).manual_seed(seed)
        return self.generators[row]


@torch.no_grad()
def stream(
    model,
    ids,
    max_new_tokens: int = 32,
    cache: str | KVCache | None = "full",
    *,
    prefill_chunk: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop_ids=None,
) -> Iterator[NewTokens]:
    """Yield one NewTokens per step, as soon as it is known.

    ids: a tensor (B, T), a list of B lists of ids of any lengths, or one list of ids.
    cache: a kind ("full" by default; see make_cache), a cache of your own, or None: recompute everything at each step.
           A cache that you pass keeps all its rows and may hold earlier tokens: `ids` then continues them. One named by
           kind is made here, and a row that has finished is dropped from it, so that it costs nothing more.
    prefill_chunk: feed the prompt in pieces of this many tokens; None: all at once.
    temperature, top_k, top_p, seed: see Sampler; temperature 0 is greedy.
    stop_ids: an id, a list of ids, or a list of such lists, one per row; default: the model's eos_token_id. A row ends
              with the stop id, which belongs to its text.
    Raises ValueError or TypeError, before anything runs, for an empty prompt, ids outside the vocabulary, a prompt that
    the cache has no room for, and options out of range. A pool may run out later: PoolExhausted.
    """
    rows = check_prompts(ids, model.config.vocab_size)
    sampler = Sampler(temperature, top_k, top_p, seed)
    stops = stop_sets(stop_ids, len(rows), model.config)
    check_int("max_new_tokens", max_new_tokens)
    if prefill_chunk is not None:
        check_int("prefill_chunk", prefill_chunk)
    ours = isinstance(cache, str)
    if ours:
        cache = make_cache(cache, model, len(rows), max(map(len, rows)) + max_new_tokens)
    elif cache is not None:
        cache = adopt(cache, len(rows))
        _check_fits(cache, rows, max_new_tokens)
    return _steps(model, rows, max_new_tokens, cache, ours, prefill_chunk, sampler, stops)


@torch.no_grad()
def _steps(model, rows, max_new_tokens, cache, ours, prefill_chunk, sampler, stops) -> Iterator[NewTokens]:
    texts = [list(row) for row in rows]
    active = list(range(len(rows)))  # rows still being written
    feed = texts  # what the next forward pass sees of each active row
    for index in range(max_new_tokens):
        if cache is None:
            logits = _forward(model, [texts[r] for r in active], None, None)
        elif ours or index == 0:
            logits = _forward(model, feed, cache, prefill_chunk if index == 0 else None)
        else:  # a cache that is not ours keeps its rows: the finished ones get padding
            feed_all = [texts[r][-1:] if r in active else [] for r in range(len(rows))]
            logits = _forward(model, feed_all, cache, None)[active]
        chosen = sampler(logits, active)
        tokens: list[int | None] = [None] * len(rows)
        for row, token in zip(active, chosen):
            tokens[row] = token
            texts[row].append(token)
        going = [i for i, row in enumerate(active) if tokens[row] not in stops[row]]
        last = index == max_new_tokens - 1 or not going
        if not last and ours and len(going) < len(active):
            cache.reorder(going)
        active = [active[i] for i in going]
        feed = [texts[r][-1:] for r in active]
        yield NewTokens(index, tokens, [last or r not in active for r in range(len(rows))])
        if last:
            return


def generate(
    model,
    ids,
    max_new_tokens: int = 32,
    cache: str | KVCache | None = "full",
    *,
    pad_token_id: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
    **options,
):
    """The prompt with max_new_tokens or fewer new tokens behind it. Options as for stream().

    A list of lists gives a list of lists, one list gives a list, a tensor (B, T) gives a tensor (B, T + longest), where
    rows that stopped early are filled up with pad_token_id (default: the model's own, else its end id, else 0).
    on_token(row, token) is called for each new token at once.
    """
    texts = check_prompts(ids, model.config.vocab_size)
    if pad_token_id is not None:
        check_int("pad_token_id", pad_token_id, 0)
    for step in stream(model, ids, max_new_tokens, cache, **options):
        for row, token in enumerate(step.tokens):
            if token is not None:
                texts[row].append(token)
                if on_token is not None:
                    on_token(row, token)
    if not isinstance(ids, Tensor):
        return texts if _is_batch(ids) else texts[0]
    pad = next(
        (p for p in (pad_token_id, model.config.pad_token_id, *_as_ids(model.config.eos_token_id)) if p is not None), 0
    )
    longest = max(map(len, texts))
    return torch.tensor([t + [pad] * (longest - len(t)) for t in texts], dtype=ids.dtype, device=ids.device)


def _forward(model, feed: list[list[int]], cache, chunk: int | None) -> Tensor:
    """Logits (B, vocab) after the last token of each row; shorter rows are padded at the left."""
    T = max(map(len, feed))
    device = model.device
    ids = torch.tensor([[0] * (T - len(row)) + row for row in feed], device=device)
    lengths = [len(row) for row in feed]
    if cache is not None:
        pos = cache.next_positions(lengths)
    else:
        pos = torch.tensor([[-1] * (T - n) + list(range(n)) for n in lengths])
    pos = pos.to(device)
    chunk = chunk or T
    if cache is not None and chunk < T:  # all of the prompt fits, or nothing is stored; the model checks one call alone
        cache.check_room(pos)
    for start in range(0, T, chunk):
        part = slice(start, start + chunk)
        logits = model(ids[:, part], cache, pos[:, part], logits_to_keep=1)
    return logits[:, -1]


def _is_batch(ids) -> bool:
    return isinstance(ids, Tensor) or (len(ids) > 0 and not isinstance(ids[0], int))


def _as_ids(ids) -> list[int]:
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int):
            raise TypeError(f"stop id {i!r} must be an int: encode text first")
    return ids


def check_prompts(ids, vocab_size: int) -> list[list[int]]:
    """Any accepted form of prompt as a list of lists, checked."""
    if isinstance(ids, Tensor):
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"ids must be an integer tensor (B, T), not {ids.dtype} of shape {tuple(ids.shape)}")
        ids = ids.tolist()
    elif not isinstance(ids, (list, tuple)):
        raise TypeError(
            f"ids must be a tensor (B, T) or a list of token ids, not {type(ids).__name__}; encode text first"
        )
    rows = list(ids) if _is_batch(ids) else [list(ids)]
    for b, row in enumerate(rows):
        if not isinstance(row, (list, tuple)):
            raise TypeError(f"prompt {b} is {row!r}: it must be a list of token ids")
    rows = [list(row) for row in rows]
    if not rows:
        raise ValueError("ids has no rows: there must be at least one prompt")
    for b, row in enumerate(rows):
        if not row:
            raise ValueError(f"prompt {b} is empty: there must be at least one token (for instance the model's bos id)")
        for i in row:
            if isinstance(i, bool) or not isinstance(i, int):
                raise TypeError(f"prompt {b} contains {i!r}: token ids are ints")
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f"prompt {b} contains id {i}, outside the vocabulary: ids run from 0 to {vocab_size - 1}"
                )
    return rows


def stop_sets(stop_ids, B: int, config) -> list[set[int]]:
    """Any accepted form of stop ids as one set for each of B rows, checked; None: the model's own end ids."""
    if stop_ids is None:
        return [set(_as_ids(config.eos_token_id))] * B
    stops = _stops_given(stop_ids, B)
    for i in set().union(*stops):
        if not 0 <= i < config.vocab_size:
            raise ValueError(f"stop id {i} can never come: ids run from 0 to {config.vocab_size - 1}")
    return stops


def _stops_given(stop_ids, B: int) -> list[set[int]]:
    if isinstance(stop_ids, int):
        return [set(_as_ids(stop_ids))] * B
    stop_ids = list(stop_ids)
    if not any(isinstance(s, (list, tuple, set)) for s in stop_ids):
        return [set(_as_ids(stop_ids))] * B
    if len(stop_ids) != B:
        raise ValueError(f"stop_ids names {len(stop_ids)} rows, there are {B}")
    return [set(_as_ids(s)) for s in stop_ids]


def _check_fits(cache: KVCache, rows: list[list[int]], max_new_tokens: int) -> None:
    """A cache of known length must hold prompt and answer; better said now than in the middle of the answer."""
    if cache.batch_size != len(rows):
        raise ValueError(
            f"{len(rows)} prompts for a cache of {cache.batch_size} rows: make it with batch_size={len(rows)}"
        )
    for held, row in zip(cache.lengths, rows):
        need = held + len(row) + max_new_tokens - 1  # the last token is not fed back
        if cache.bounded and need > cache.max_length:
            raise CacheFull(
                f"{held} tokens held, {len(row)} in the prompt and {max_new_tokens} to come need max_length={need}, "
                f"the cache has max_length={cache.max_length}"
            )
