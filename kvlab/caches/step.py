"""One forward pass as a cache sees it, the errors of this package, and small helpers that the caches share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvlab.attention import View
    from kvlab.caches.base import KVCache


class CacheFull(ValueError):
    """More tokens than the cache has room for. Nothing was changed."""


class RewindError(ValueError):
    """Asked to forget more than can be undone. `.largest` is the largest n that would work. Nothing was changed."""

    def __init__(self, message: str, largest: int):
        super().__init__(message)
        self.largest = largest


class NotOffered(NotImplementedError):
    """This cache does not have that operation."""


@dataclass
class Step:
    """One forward pass as a cache sees it. T columns per row; a row's real tokens have the positions start..after-1."""

    pos: Tensor  # (B, T), -1 = padding
    start: list[int]  # tokens in each row before the step
    after: list[int]  # and after it

    @cached_property
    def uniform(self) -> bool:
        """All rows have the same length and no padding, so that slices do the work of index lists."""
        return len(set(self.start)) == 1 and all(a - s == self.pos.shape[1] for s, a in zip(self.start, self.after))

    @cached_property
    def real(self) -> tuple[Tensor, Tensor]:
        """Row and column of every token that is not padding -> two tensors (N,)."""
        if self.uniform:  # without asking the device
            (B, T), device = self.pos.shape, self.pos.device
            return torch.arange(B, device=device).repeat_interleave(T), torch.arange(T, device=device).repeat(B)
        return torch.nonzero(self.pos >= 0, as_tuple=True)


class StepHooks:
    """What a cache file of this package may write; all but _write can be left as they are."""

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        raise NotOffered(f"{type(self).__name__} has neither append nor _write")

    def _check_room(self, step: Step) -> None:
        """Raise CacheFull if the step does not fit."""

    def _begin(self, step: Step) -> None:
        """Once per forward pass, before the first layer writes: what all layers share."""

    def _finish(self, step: Step) -> None:
        """Once per forward pass, after the last layer."""

    def _undo(self, step: Step) -> None:
        """Restore what an unfinished step has overwritten."""

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        """The tokens at `pos` of `rows`, (N,) each, are gone: a rewind forgot them, or their step failed and is undone.
        Put zeros where they lay, unless another token lies there now: NaN in a slot that is shown and masked poisons.
        """

    def _reorder(self, rows: list[int]) -> None:
        raise NotOffered(f"{type(self).__name__} does not offer reorder")

    def _rewind(self, n: list[int]) -> None:
        raise NotOffered(f"{type(self).__name__} does not offer rewind")


def plan_step(pos: Tensor, lengths: list[int]) -> Step:
    """The step that `pos` (B, T) describes. Raises ValueError unless each row goes on from its length.

    On the meta device, where tensors have sizes and no values, pos is taken for T next tokens in every row.
    """
    if len(pos) != len(lengths):
        raise ValueError(
            f"{len(pos)} rows of tokens for a cache of {len(lengths)} rows: make it with batch_size={len(pos)}"
        )
    rows = [[*range(n, n + pos.shape[1])] for n in lengths] if pos.device.type == "meta" else pos.tolist()
    after = []
    for row, (start, columns) in enumerate(zip(lengths, rows)):
        real = [p for p in columns if p != -1]
        if real != list(range(start, start + len(real))):
            raise ValueError(
                f"row {row} has {start} tokens, so its next positions start at {start}; got {real[:4]}"
                f"{' ...' if len(real) > 4 else ''} (use cache.next_positions)"
            )
        after.append(start + len(real))
    return Step(pos, list(lengths), after)


def tokens_between(start: list[int], end: list[int], device) -> tuple[Tensor, Tensor]:
    """Row and position of the tokens start[b] .. end[b] - 1 of every row b -> two tensors (N,)."""
    gone = [(row, p) for row, (a, b) in enumerate(zip(start, end)) for p in range(a, b)]
    return tuple(torch.tensor(gone, dtype=torch.int64, device=device).view(-1, 2).T)


def check_keys_values(k: Tensor, v: Tensor, pos: Tensor, dtype: torch.dtype | None, device) -> None:
    """Raises ValueError, naming both sides, unless k, v, pos fit each other and what the cache holds already."""
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"keys {tuple(k.shape)}, values {tuple(v.shape)}: must be (B, n_kv, T, D) and agree in all but D"
        )
    if pos.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"pos {tuple(pos.shape)} must be (B, T) = {(k.shape[0], k.shape[2])} as in keys {tuple(k.shape)}"
        )
    for name, x in (("keys", k), ("values", v)):
        if dtype is not None and x.dtype != dtype:
            raise ValueError(f"{name} are {x.dtype}, the cache holds {dtype}: a cache serves one dtype")
        if device is not None and x.device != device:
            raise ValueError(f"{name} are on {x.device}, the cache is on {device}: make a cache for that device")


def check_same_model(layer: int, new: tuple[int, int, int], shapes: dict[int, tuple], layers: int) -> None:
    """Raises ValueError for a layer, or for (n_kv, D, D of values), that the cache's earlier steps did not have."""
    if layer >= layers > 0:  # its earlier tokens would be missing
        raise ValueError(f"layer {layer} is one more than the {layers} seen so far: a cache serves one model")
    held = shapes.get(layer, new)
    if new != held:
        raise ValueError(
            f"layer {layer} has (n_kv, D, D of values) = {new}, the cache holds {held}: a cache serves one model"
        )


def per_row(name: str, n: int | list[int], batch_size: int) -> list[int]:
    """One number for all rows, or one for each, as a list."""
    each = [n] * batch_size if isinstance(n, int) else ints(name, n)
    if len(each) != batch_size:
        raise ValueError(f"{name} names {len(each)} rows, the cache has {batch_size}")
    return each


def check_rows(rows, batch_size: int) -> list[int]:
    """The rows of a reorder as a list, each of which must exist."""
    rows = ints("reorder", rows)
    if bad := [r for r in rows if not 0 <= r < batch_size]:
        raise ValueError(f"reorder: row {bad[0]} does not exist; rows run from 0 to {batch_size - 1}")
    if not rows:
        raise ValueError("reorder: rows is empty; keep at least one row")
    return rows


def check_length(cache: KVCache, step: Step) -> None:
    """Raises CacheFull if a row would exceed max_length."""
    for row, n in enumerate(step.after):
        if n > cache.max_length:
            raise CacheFull(
                f"row {row} would have {n} tokens and the cache has room for max_length={cache.max_length}: "
                f"make it with max_length={n} or more"
            )


def ints(name: str, values) -> list[int]:
    """`values`, a list or tensor of ints, as a list. TypeError otherwise: int() would cut 0.7 down to row 0."""
    try:
        return [index(x) for x in values]
    except TypeError:
        raise TypeError(f"{name}: {values!r} must be a list of ints") from None


def slot_is_position(lengths: list[int], S: int, device) -> Tensor:
    """Positions (B, S) of slots where slot = position: 0, 1, 2, ... and -1 from each row's length on."""
    slots = torch.arange(S, device=device)
    if len(set(lengths)) == 1:
        return slots.masked_fill(slots >= lengths[0], -1).expand(len(lengths), S)
    return torch.where(slots < torch.tensor(lengths, device=device)[:, None], slots, -1)


def bytes_per_token(k: Tensor, v: Tensor) -> int:
    """Bytes of one token's key and value in one layer, for k, v (B, n_kv, S, D)."""
    return k.shape[1] * (k.shape[3] * k.element_size() + v.shape[3] * v.element_size())
