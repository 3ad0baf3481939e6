"""KVCache: the one interface. A cache is an object passed to model(ids, cache): a new generation is a new cache.

A small cache of your own needs one method, `append`. The caches of this package write `_write` instead, and
leave the checks, the positions and the undoing of a failed step to this file. (All that they may write: StepHooks.)
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.step import (  # noqa: F401  (what a cache file needs, it takes from here)
    CacheFull,
    NotOffered,
    RewindError,
    Step,
    StepHooks,
    bytes_per_token,
    check_keys_values,
    check_length,
    check_rows,
    check_same_model,
    per_row,
    plan_step,
    slot_is_position,
    tokens_between,
)
from kvlab.config import check_int


class KVCache(StepHooks):
    """Keys and values of the tokens seen so far, for every layer, of `batch_size` rows.

    append(layer, k, v, pos) -> View     stores k, v (B, n_kv, T, D) at positions pos (B, T) and shows what may be seen
    advance(pos)                         the step counts from here on (the model calls it once, after the last layer)
    next_positions(lengths)              positions for that many new tokens per row
    reorder(rows), rewind(n), fork()     a cache that cannot do one of them raises NotOffered
    nbytes, nbytes_by(), nbytes_in_use   bytes held, by what holds them, and the part that holds tokens
    bytes_copied, bytes_read             counters, summed over steps and layers:
        copied: stored bytes moved or gathered, beyond writing the new tokens. Per layer and step, with `one` the
                bytes of one token's key and value, S tokens held before and B rows:
                growing B*S*one; full 0; sliding 0 for one token, B*min(S, W + sinks)*one for a chunk;
                the others: see their files.
        read:   stored bytes that the step's attention must read: what the cache holds of each row, new tokens included.
                Layers that follow another (kv_owner) read its view again; the cache does not hear of it.
    dtype and device come from the first append.
    """

    bounded = False  # True: no row may hold more than max_length tokens
    forgets_after: int | None = None  # from so many tokens of a row on, something leaves it; None: never
    wants_weights = False  # True: the model calls observe(layer, weights) with this step's attention weights

    def __init__(self, batch_size: int = 1, max_length: int | None = None):
        check_int("batch_size", batch_size)
        if self.bounded or max_length is not None:
            check_int("max_length", max_length)
        self.lengths = [0] * batch_size  # tokens seen by each row = position of its next token
        self.max_length = max_length
        self.dtype = self.device = None
        self.bytes_copied = self.bytes_read = 0
        self._step: Step | None = None
        self._last_layer = -1
        self._layers = 0  # layers that a complete step had
        self._shapes: dict[int, tuple[int, int, int]] = {}  # layer -> n_kv, D, Dv
        self._broken = ""

    @classmethod
    def for_model(cls, model, batch_size: int, max_length: int, **options) -> KVCache:
        """A cache that fits the model; make_cache() calls this."""
        return cls(batch_size, max_length, **options)

    # ---- the model's side

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    def next_positions(self, lengths: int | list[int]) -> Tensor:
        """Positions (B, T) of the next tokens: `lengths` of them in every row, or lengths[b] in row b.

        Shorter rows are padded at the left with -1, so that the last column is each row's newest token.
        """
        new = per_row("lengths", lengths, self.batch_size)
        if min(new) < 0:
            raise ValueError(f"lengths={lengths} must be 0 or more new tokens")
        T = max(new)
        return torch.tensor([[-1] * (T - n) + list(range(s, s + n)) for s, n in zip(self.lengths, new)])

    def max_chunk(self, T: int) -> int:
        """How many of the next T columns may be appended at once; the model splits the rest."""
        return T

    def check_room(self, pos: Tensor) -> None:
        """Raises if the tokens at `pos` are not each row's next ones, or do not fit. Changes nothing."""
        if self._broken:
            raise RuntimeError(self._broken)
        self._check_room(self._plan(pos))

    def append(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> View:
        """Store this step's k, v (B, n_kv, T, D) and return the View. Gradients stop here: a cache is for inference.

        Raises ValueError, with nothing changed, for shapes, dtype, device or positions that do not fit.
        """
        k, v = k.detach(), v.detach()
        self._check(layer, k, v, pos)
        if self._step is None or layer <= self._last_layer:  # a new forward pass; one that never advanced is undone
            self._forget_step()
            step = self._plan(pos)
            self._check_room(step)
            self._begin(step)
            self._step = step
        self._last_layer = layer
        view = self._write(layer, k, v, self._step)
        self.dtype, self.device = k.dtype, k.device
        self._shapes[layer] = k.shape[1], k.shape[3], v.shape[3]
        return view

    def observe(self, layer: int, weights: Tensor) -> None:
        """Attention weights (B, n_kv, T, S) of this step, summed over the group; only if wants_weights."""

    def advance(self, pos: Tensor) -> None:
        """The step with positions `pos` (B, T) is complete: from here on it counts."""
        step = self._step or self._plan(pos)
        self._finish(step)
        self._layers = self._last_layer + 1
        self.lengths = list(step.after)
        self._step, self._last_layer = None, -1

    def abort(self, earlier_chunks: bool = False) -> None:
        """A layer raised: forget the step. What cannot be undone (chunks stored earlier in the same call, or an append
        that is not this file's) leaves the cache unusable, and it says so."""
        self._forget_step()
        if earlier_chunks or type(self).append is not KVCache.append:
            self._broken = "this cache is unusable: a call failed after part of it was stored; make a new one"

    def _forget_step(self) -> None:
        if step := self._step:
            self._step, self._last_layer = None, -1
            self._undo(step)
            self._clear(*tokens_between(self.lengths, step.after, self.device))

    # ---- operations on whole rows

    def reorder(self, rows) -> None:
        """Row i becomes what row rows[i] was; rows may repeat or be dropped (beam search, finished rows)."""
        rows = check_rows(rows, self.batch_size)
        self._forget_step()
        lengths = [self.lengths[r] for r in rows]
        self._reorder(rows)
        self.lengths = lengths

    def rewind(self, n: int | list[int]) -> None:
        """Forget the newest n tokens of every row, or n[b] of row b. Raises RewindError past what can be undone."""
        n = per_row("rewind", n, self.batch_size)
        if min(n) < 0:
            raise ValueError(f"rewind by {min(n)} tokens: n must be 0 or more")
        for row, (x, length) in enumerate(zip(n, self.lengths)):
            if x > (most := self._largest_rewind(row)):
                raise RewindError(f"row {row} has {length} tokens and can forget at most {most} of them, not {x}", most)
        self._forget_step()
        before = self.lengths
        self._rewind(n)
        self.lengths = after = [length - x for length, x in zip(before, n)]
        self._clear(*tokens_between(after, before, self.device))

    def fork(self) -> KVCache:
        """A second cache with the same content; neither sees what the other appends."""
        self._forget_step()
        return copy.deepcopy(self)

    # ---- bytes

    def nbytes_by(self) -> dict[str, int]:
        """Bytes held in all layers, by what holds them: keys, values, scales, tail, positions, tables, scores."""
        raise NotOffered(f"{type(self).__name__} does not say how many bytes it holds")

    @property
    def nbytes(self) -> int:
        return sum(self.nbytes_by().values())

    @property
    def nbytes_in_use(self) -> int:
        """The part of nbytes that holds tokens now."""
        return self.nbytes

    def _largest_rewind(self, row: int) -> int:
        return self.lengths[row]

    def _plan(self, pos: Tensor) -> Step:
        return plan_step(pos, self.lengths)

    def _check(self, layer: int, k: Tensor, v: Tensor, pos: Tensor) -> None:
        if self._broken:
            raise RuntimeError(self._broken)
        check_keys_values(k, v, pos, self.dtype, self.device)
        check_same_model(layer, (k.shape[1], k.shape[3], v.shape[3]), self._shapes, self._layers)
