"""A budget of tokens for each head: past it, every new token takes the slot of one that is given up.

Which one that is, evicting.py says; here is what its three caches have in common.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, check_length
from kvlab.caches.head_slots import HeadSlots, read_budget, read_share
from kvlab.config import check_int

FAR = 2**31 - 1  # a position that no token reaches


class EvictingCache(KVCache):
    """Keys, values and positions in a fixed number of slots for each head; a subclass picks the victim.

    Eviction is defined token by token, for each row, layer and KV head by itself: before token p is stored in a head
    that holds `budget` tokens, one of them goes, and p takes its slot. So the query at p sees budget tokens, its own
    included. The newest `safe` of them, p included, are never given up. Positions stay what they are: a head's tokens
    are no longer neighbours, and View.pos (B, n_kv, S) says so. Up to the smallest budget nothing is evicted and a
    chunk may have any length; from there max_chunk is 1.
    budget: tokens kept by each head, or a table of them, (layers, n_kv). One above max_length keeps everything: then
    no row may hold more than max_length tokens, and only that many slots are made.
    Bytes, with N the sum over layers and heads of min(budget, max_length): keys, values B*N*D*itemsize each; positions
    4*B*N, as heads differ; scores B*N*max(4, itemsize) where there are any. Copied: nothing where a layer's heads have
    the same budget, else the view's B*n_kv*S*2D*itemsize.
    rewind: any number of tokens before the first was evicted; after that only the newest, whose slot is free again.
    """

    keeps_scores = False

    def __init__(self, batch_size: int, max_length: int | None, budget, recent: int | float = 1, grace: int = 0):
        super().__init__(batch_size, max_length)
        self.budget, self.recent, self.grace = read_budget(budget), read_share("recent", recent), grace
        check_int("grace", grace, 0)
        self.table = self.budget if isinstance(self.budget, list) else [[self.budget]]
        for n in {n for row in self.table for n in row}:
            if grace >= n:
                raise ValueError(f"grace={grace} keeps {grace + 1} tokens safe, more than a budget of {n} tokens holds")
            if isinstance(recent, int) and recent > n:
                raise ValueError(
                    f"recent={recent} tokens are more than a budget of {n}: at most {n}, or a share like 0.5"
                )
        least, most = min(map(min, self.table)), max(map(max, self.table))
        self.forgets_after = least
        self.bounded = max_length is not None and most > max_length
        self.least = min(least, max_length or least)  # up to here nothing is evicted anywhere
        self.slots: dict[int, HeadSlots] = {}
        self.safe: dict[int, Tensor] = {}  # layer -> (n_kv, 1), newest tokens that cannot go
        self.k: dict[int, Tensor] = {}  # layer -> (B, slots of all heads, D)
        self.v: dict[int, Tensor] = {}
        self.pos: dict[int, Tensor] = {}  # layer -> (B, slots of all heads) int32, -1 = empty
        self.score: dict[int, Tensor] = {}  # likewise, if scores are kept
        self.high = [0] * batch_size  # the longest each row has been
        self._forget()

    @classmethod
    def for_model(cls, model, batch_size, max_length, **options):
        cache = cls(batch_size, max_length, **options)
        layers, heads = model.config.num_hidden_layers, model.config.kv_shape[0]
        if isinstance(cache.budget, list) and (len(cache.table), len(cache.table[0])) != (layers, heads):
            shape = f"{len(cache.table)} layers of {len(cache.table[0])} heads"
            raise ValueError(f"budget is a table for {shape}; the model has {layers} layers of {heads} KV heads")
        return cache

    def budgets_of(self, layer: int, n_kv: int) -> list[int]:
        """The budget of each of a layer's KV heads."""
        return self.table[layer] if isinstance(self.budget, list) else [self.budget] * n_kv

    def safe_of(self, budget: int) -> int:
        """How many of a head's newest tokens cannot be given up, the one that is being stored included."""
        recent = int(self.recent * budget) if isinstance(self.recent, float) else self.recent
        return max(recent, self.grace + 1)

    def max_chunk(self, T: int) -> int:
        return min(T, max(1, self.least - max(self.lengths)))

    def _check(self, layer, k, v, pos):
        super()._check(layer, k, v, pos)
        if isinstance(self.budget, list) and (layer >= len(self.table) or k.shape[1] != len(self.table[0])):
            shape = f"{len(self.table)} layers of {len(self.table[0])} heads"
            raise ValueError(f"budget is a table for {shape}; layer {layer} has {k.shape[1]} KV heads")

    def _check_room(self, step: Step) -> None:
        if self.bounded:
            check_length(self, step)

    def _begin(self, step: Step) -> None:
        T = step.pos.shape[1]
        self.evicts = max(step.after) > self.least
        if self.evicts and T > 1:
            raise ValueError(f"{T} columns at once: past {self.least} tokens it is one at a time (see max_chunk)")
        self.rows, columns = step.real
        self.columns, self.p = columns, step.pos[self.rows, columns]  # (N,): the step's tokens, padding left out
        self.now = torch.tensor(step.start, device=step.pos.device)[:, None, None]  # where each row's new token stands

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        if layer not in self.k:
            self._allocate(layer, k, v)
        slots, K, V, rows = self.slots[layer], self.k[layer], self.v[layer], self.rows[:, None]
        slot = self._slot(layer)[self.rows] if self.evicts else self.p[:, None]  # else slot = position
        at = self.at[layer] = slots.start + slot  # (N, n_kv)
        if self.evicts:
            self.saved[layer] = K[rows, at], V[rows, at]  # for _undo
        K[rows, at], V[rows, at] = k[self.rows, :, self.columns], v[self.rows, :, self.columns]
        self.next_pos[layer] = self.pos[layer].index_put((rows, at), self.p[:, None].int())  # counts from _finish on
        S = min(max(step.after), slots.most)
        view_k, view_v = slots.by_head(K, S), slots.by_head(V, S)
        if not slots.even:
            self.bytes_copied += view_k.nbytes + view_v.nbytes
        held = sum(min(n, size) for n in step.after for size in slots.budgets)
        self.bytes_read += held * (K[0, 0].nbytes + V[0, 0].nbytes)
        seen = slots.even and step.uniform and step.pos.shape[1] == 1
        view_pos = slots.by_head(self.next_pos[layer], S, nothing=-1)
        return View(view_k, view_v, view_pos, all_visible=seen)

    def _allocate(self, layer: int, k: Tensor, v: Tensor) -> None:
        B, n_kv = k.shape[:2]
        budgets = self.budgets_of(layer, n_kv)
        safe = [self.safe_of(n) for n in budgets]
        self.slots[layer] = HeadSlots([min(n, self.max_length or n) for n in budgets], k.device)
        self.safe[layer] = torch.tensor(safe, device=k.device)[:, None]
        total = self.slots[layer].total
        self.k[layer], self.v[layer] = k.new_zeros(B, total, k.shape[3]), v.new_zeros(B, total, v.shape[3])
        self.pos[layer] = torch.full((B, total), -1, dtype=torch.int32, device=k.device)
        if self.keeps_scores:
            exact = torch.float64 if k.dtype == torch.float64 else torch.float32
            self.score[layer] = k.new_zeros(B, total, dtype=exact)

    def _slot(self, layer: int) -> Tensor:
        """The slot of each row's new token in each head: the first that is empty, else the victim's -> (B, n_kv)"""
        slots = self.slots[layer]
        pos = slots.by_head(self.pos[layer], slots.most, nothing=FAR)  # (B, n_kv, S); FAR: the head has no such slot
        index = torch.arange(slots.most, device=pos.device)
        empty = torch.where(pos < 0, index, FAR).amin(-1)
        victim = self._victim(layer, pos, (pos >= 0) & (pos <= self.now - self.safe[layer]))
        return torch.where(empty < FAR, empty, victim)

    def _victim(self, layer: int, pos: Tensor, may_go: Tensor) -> Tensor:
        """The slot to give up in each head, of those that may go; pos, may_go (B, n_kv, S) -> (B, n_kv)"""
        raise NotImplementedError

    def _finish(self, step: Step) -> None:
        self.pos |= self.next_pos
        self.high = [max(h, n) for h, n in zip(self.high, step.after)]
        self._forget()

    def _undo(self, step: Step) -> None:
        for layer, (k, v) in self.saved.items():
            self.k[layer][self.rows[:, None], self.at[layer]] = k
            self.v[layer][self.rows[:, None], self.at[layer]] = v
        self._forget()

    def _forget(self) -> None:
        self.at, self.saved, self.next_pos = {}, {}, {}  # what a step leaves behind, by layer

    def _reorder(self, rows: list[int]) -> None:
        for held in (self.k, self.v, self.pos, self.score):
            for layer in held:
                held[layer] = held[layer][rows]
        self.high = [self.high[r] for r in rows]

    def _largest_rewind(self, row: int) -> int:
        n, high = self.lengths[row], self.high[row]
        # the newest token's victim would go again when its place is taken again, whatever the new token is
        return n if high <= self.least else max(0, n - (high - 1))

    def _rewind(self, n: list[int]) -> None:
        left = [length - x for length, x in zip(self.lengths, n)]
        self.high = [m if h <= self.least else h for h, m in zip(self.high, left)]
        for pos in self.pos.values():
            pos[pos >= torch.tensor(left, device=pos.device)[:, None]] = -1

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        for layer, held in self.pos.items():
            for x in (self.k[layer], self.v[layer]):
                x.masked_fill_((held < 0)[..., None], 0)

    def nbytes_by(self) -> dict[str, int]:
        held = {"keys": self.k, "values": self.v, "positions": self.pos}
        held |= {"scores": self.score} if self.keeps_scores else {}
        return {name: sum(x.nbytes for x in by_layer.values()) for name, by_layer in held.items()}

    @property
    def nbytes_in_use(self) -> int:
        return sum(
            sum(min(n, size) for n in self.lengths for size in self.slots[i].budgets)
            * (self.k[i][0, 0].nbytes + self.v[i][0, 0].nbytes)
            for i in self.k
        )
