"""Two caches that keep everything: one grows by torch.cat at each step, one is allocated once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, bytes_per_token, check_length, slot_is_position


class GrowingCache(KVCache):
    """torch.cat at each step: the shortest cache there is, and the copying that it costs.

    Every step copies all earlier keys and values into a new tensor, and for a moment both exist: peak = old + new.
    Padding is stored like any token, with position -1.
    Bytes: keys, values B*S*n_kv*D*itemsize per layer for S columns; positions 8*B*S once.
    """

    def __init__(self, batch_size: int = 1, max_length: int | None = None):
        super().__init__(batch_size)  # max_length is accepted and not needed
        self.k: dict[int, Tensor] = {}  # layer -> (B, n_kv, S, D)
        self.v: dict[int, Tensor] = {}
        self.pos = torch.empty(batch_size, 0, dtype=torch.int64)  # (B, S)

    def _begin(self, step: Step) -> None:
        self.next_pos = torch.cat((self.pos.to(step.pos.device), step.pos), 1)

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        S = self.pos.shape[1]
        if S:
            k = torch.cat((self.k[layer], k), 2)
            v = torch.cat((self.v[layer], v), 2)
        self.k[layer], self.v[layer] = k, v
        one = bytes_per_token(k, v)
        self.bytes_copied += self.batch_size * S * one
        self.bytes_read += k.shape[0] * k.shape[2] * one
        return View(k, v, self.next_pos, all_visible=step.uniform and step.pos.shape[1] == 1 and min(step.after) > S)

    def _finish(self, step: Step) -> None:
        self.pos = self.next_pos

    def _undo(self, step: Step) -> None:
        self._cut(self.pos.shape[1])

    def _reorder(self, rows: list[int]) -> None:
        self._keep(lambda x: x[rows])

    def _rewind(self, n: list[int]) -> None:
        lengths = torch.tensor([length - x for length, x in zip(self.lengths, n)], device=self.pos.device)
        self.pos = torch.where(self.pos < lengths[:, None], self.pos, -1)
        used = torch.nonzero((self.pos >= 0).any(0))
        self._cut(int(used[-1]) + 1 if len(used) else 0)

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        for x in (*self.k.values(), *self.v.values()) if (self.pos < 0).any() else ():
            x.masked_fill_((self.pos < 0)[:, None, :, None], 0)

    def _cut(self, S: int) -> None:
        self._keep(lambda x: (x[:, :S] if x.dim() == 2 else x[:, :, :S]).clone())  # a view would pin the old storage

    def _keep(self, pick) -> None:
        self.pos = pick(self.pos)
        self.k = {layer: pick(x) for layer, x in self.k.items()}
        self.v = {layer: pick(x) for layer, x in self.v.items()}

    def nbytes_by(self) -> dict[str, int]:
        return {
            "keys": sum(x.nbytes for x in self.k.values()),
            "values": sum(x.nbytes for x in self.v.values()),
            "positions": self.pos.nbytes,
        }

    @property
    def nbytes_in_use(self) -> int:
        return sum(sum(self.lengths) * bytes_per_token(self.k[i], self.v[i]) for i in self.k)


class FullCache(KVCache):
    """Allocated once for max_length tokens; slot = position. What an engine without paging does for each sequence.

    A step writes its T tokens and copies nothing. Rows of unequal length have empty slots at their end; those hold
    zeros, never NaN, and position -1 hides them.
    Bytes: keys, values B*max_length*n_kv*D*itemsize per layer, whatever the length; positions none, slot = position.
    """

    bounded = True

    def __init__(self, batch_size: int = 1, max_length: int = 1024):
        super().__init__(batch_size, max_length)
        self.k: dict[int, Tensor] = {}  # layer -> (B, n_kv, max_length, D)
        self.v: dict[int, Tensor] = {}

    def _check_room(self, step: Step) -> None:
        check_length(self, step)

    def _begin(self, step: Step) -> None:
        self.view_pos = slot_is_position(step.after, max(step.after), step.pos.device)

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        if layer not in self.k:
            self.k[layer] = k.new_zeros(*k.shape[:2], self.max_length, k.shape[3])
            self.v[layer] = v.new_zeros(*v.shape[:2], self.max_length, v.shape[3])
        K, V, n = self.k[layer], self.v[layer], self.view_pos.shape[1]
        if step.uniform:
            K[:, :, step.start[0] : n] = k
            V[:, :, step.start[0] : n] = v
        else:
            rows, columns = step.real
            slots = step.pos[rows, columns]
            K[rows, :, slots] = k[rows, :, columns]
            V[rows, :, slots] = v[rows, :, columns]
        self.bytes_read += sum(step.after) * bytes_per_token(k, v)
        return View(K[:, :, :n], V[:, :, :n], self.view_pos, all_visible=step.uniform and step.pos.shape[1] == 1)

    def _reorder(self, rows: list[int]) -> None:
        self.k = {layer: x[rows] for layer, x in self.k.items()}
        self.v = {layer: x[rows] for layer, x in self.v.items()}

    def _rewind(self, n: list[int]) -> None:
        pass  # slot = position: a shorter length is all there is to it

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        for x in (*self.k.values(), *self.v.values()):
            x[rows, :, pos] = 0

    def nbytes_by(self) -> dict[str, int]:
        return {
            "keys": sum(x.nbytes for x in self.k.values()),
            "values": sum(x.nbytes for x in self.v.values()),
        }

    @property
    def nbytes_in_use(self) -> int:
        return sum(sum(self.lengths) * bytes_per_token(self.k[i], self.v[i]) for i in self.k)
