"""Old tokens as packed codes, the newest in full precision."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, check_length, slot_is_position
from kvlab.caches.codecs import make_codec
from kvlab.config import check_int


class QuantizedCache(KVCache):
    """Keys and values as int8, int4, int2 or fp8, K and V apart; the last `residual_length` or more tokens unrounded.

    Tokens are sealed (encoded, and never touched again) in groups of `group_size`, aligned to each row's absolute
    positions. A group is sealed at the first append after it is complete and none of it is among the newest
    residual_length tokens. So what the query at position p sees depends on p alone: p >= R + G sees tokens
    0 .. ((p - R) // G) * G - 1 rounded, and all later ones as they are (R = residual_length, G = group_size).
    key_axis "channel": one scale per channel and group of tokens, as in KIVI (arXiv 2402.02750); "token": one per
    token and group of channels, as for values. With fp8 there are no scales, and groups only set when to seal.
    The step reads codes and decodes all of them into a temporary: smaller is not faster by itself. (folding.py attends
    over the codes as they are.)
    Bytes per layer: codes B*n_kv*S*D*bits/8 for each of K and V with S = max_length rounded down to whole groups;
    scales 4 bytes per group of codes (fp16 scale and zero point); tail B*n_kv*min(R + G, max_length)*2D*itemsize.
    Copied per layer and step: what is assembled for the view (sealed codes, scales, tail in use), and a group sealed.
    """

    bounded = True

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int = 1024,
        k_bits: int | str = 8,
        v_bits: int | str = 8,
        key_axis: str = "channel",
        group_size: int = 64,
        residual_length: int = 64,
        dims: tuple[int, int] | None = None,
    ):
        super().__init__(batch_size, max_length)
        check_int("group_size", group_size)
        check_int("residual_length", residual_length, 0)
        if key_axis not in ("channel", "token"):
            raise ValueError(f"key_axis={key_axis!r} must be 'channel' (KIVI) or 'token'")
        self.bits, self.key_axis = (k_bits, v_bits), key_axis
        self.group, self.residual = group_size, residual_length
        self.capacity = max_length // group_size * group_size  # tokens that can ever be sealed
        self.tail_slots = min(residual_length + group_size, max_length)  # token p lives in tail slot p % tail_slots
        self.codecs = self._codecs(*dims) if dims else None  # dims: of a key and a value; else at the first append
        self.codes: dict[int, tuple] = {}  # layer -> (K's, V's), each (codes, scale, zero point)
        self.tail: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> (k, v), each (B, n_kv, tail_slots, D)
        self.sealed: dict[int, list[int]] = {}  # layer -> tokens sealed, per row
        self._saved: dict[int, tuple[list[int], tuple[Tensor, ...]]] = {}  # for _undo

    @classmethod
    def for_model(cls, model, batch_size, max_length, **options):
        return cls(batch_size, max_length, dims=model.config.kv_shape[1:], **options)

    def _codecs(self, k_dim: int, v_dim: int):
        k = make_codec(self.bits[0], self.key_axis, self.group, k_dim)
        return k, make_codec(self.bits[1], "token", self.group, v_dim)

    def sealed_at(self, p: int) -> int:
        """How many tokens the query at position p sees rounded."""
        return max(0, (p - self.residual) // self.group * self.group)

    def max_chunk(self, T: int) -> int:
        return min(T, *(self.sealed_at(n) + self.residual + self.group - n for n in self.lengths)) if T > 1 else T

    def _check_room(self, step: Step) -> None:
        check_length(self, step)

    def _begin(self, step: Step) -> None:
        device, n = step.pos.device, step.after
        target = [self.sealed_at(s) for s in step.start]
        self.target, self.n_sealed = target, max(target)
        if step.uniform:  # tail slots in order of position
            self.order = torch.arange(target[0], n[0], device=device) % self.tail_slots
            self.view_pos = slot_is_position(n, n[0], device)
        else:
            slot, end = torch.arange(self.tail_slots, device=device), torch.tensor(n, device=device)[:, None]
            newest = end - 1 - (end - 1 - slot) % self.tail_slots  # the newest position that each tail slot has had
            newest = torch.where(newest >= torch.tensor(target, device=device)[:, None], newest, -1)
            self.order, self.view_pos = slot, torch.cat((slot_is_position(target, self.n_sealed, device), newest), 1)
        rows, columns = step.real
        self.rows, self.columns, self.at = rows, columns, step.pos[rows, columns] % self.tail_slots

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        if layer not in self.codes:
            self._allocate(layer, k, v)
        if self.sealed[layer] != self.target:  # else the slots written now hold nothing that is not sealed
            self._saved[layer] = self.sealed[layer], tuple(x[self.rows, :, self.at] for x in self.tail[layer])
        self._seal(layer, step)
        parts = []
        for x, tail, codec, codes in zip((k, v), self.tail[layer], self.codecs, self.codes[layer]):
            tail[self.rows, :, self.at] = x[self.rows, :, self.columns]
            recent = tail[:, :, self.order]
            self.bytes_copied += recent.nbytes
            if not self.n_sealed:
                parts.append(recent)
                continue
            old = [c[:, :, s] for c, s in zip(codes, codec.rows(0, self.n_sealed))]
            parts.append(torch.cat((codec.decode(*old, dtype=x.dtype), recent), 2))
            self.bytes_copied += sum(c.nbytes for c in old)
        self.bytes_read += self._bytes_of(layer, step.after, self.target)
        return View(*parts, self.view_pos, all_visible=step.uniform and step.pos.shape[1] == 1)

    def _allocate(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.codecs = self.codecs or self._codecs(k.shape[3], v.shape[3])
        B, n_kv = k.shape[:2]
        self.codes[layer] = tuple(c.empty(B, n_kv, self.capacity, k.dtype, k.device) for c in self.codecs)
        self.tail[layer] = tuple(x.new_zeros(B, n_kv, self.tail_slots, x.shape[3]) for x in (k, v))
        self.sealed[layer] = [0] * self.batch_size

    def _seal(self, layer: int, step: Step) -> None:
        """Encode what is due, for all rows at once where they agree."""
        due = list(zip(self.sealed[layer], self.target))
        together = len(set(due)) == 1
        for row, (done, target) in enumerate(due[:1] if together else due):
            rows = slice(None) if together else slice(row, row + 1)
            while done < target:
                upto = done + self.group
                slots = torch.arange(done, upto, device=self.device) % self.tail_slots
                for tail, codec, codes in zip(self.tail[layer], self.codecs, self.codes[layer]):
                    group = tail[rows][:, :, slots]
                    for store, new, where in zip(codes, codec.encode(group), codec.rows(done, upto)):
                        store[rows, :, where] = new
                    self.bytes_copied += group.nbytes
                done = upto
        self.sealed[layer] = list(self.target)

    def _finish(self, step: Step) -> None:
        self._saved.clear()

    def _undo(self, step: Step) -> None:
        for layer, (sealed, kept) in self._saved.items():
            self.sealed[layer] = sealed
            for tail, x in zip(self.tail[layer], kept):
                tail[self.rows, :, self.at] = x
        self._saved.clear()

    def _reorder(self, rows: list[int]) -> None:
        self.codes = {i: tuple(tuple(c[rows] for c in kv) for kv in both) for i, both in self.codes.items()}
        self.tail = {i: tuple(x[rows] for x in both) for i, both in self.tail.items()}
        self.sealed = {i: [s[r] for r in rows] for i, s in self.sealed.items()}

    def _largest_rewind(self, row: int) -> int:
        sealed = max((s[row] for s in self.sealed.values()), default=0)
        return self.lengths[row] - (sealed + self.residual if sealed else 0)

    def _rewind(self, n: list[int]) -> None:
        pass  # the tail's slots follow from the position

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        for layer, tail in self.tail.items():  # a failed step may have restored a token that is not sealed
            empty = pos - self.tail_slots < torch.tensor(self.sealed[layer], device=pos.device)[rows]
            for x in tail:
                x[rows[empty], :, pos[empty] % self.tail_slots] = 0

    def _bytes_of(self, layer: int, lengths: list[int], sealed: list[int]) -> int:
        """Stored bytes of these rows' tokens in one layer."""
        tail = self.tail[layer]
        per_tail = sum(x[0, :, 0].nbytes for x in tail)
        per_sealed = sum(c[0].nbytes for both in self.codes[layer] for c in both) / max(1, self.capacity)
        return round(sum(s * per_sealed + (n - s) * per_tail for n, s in zip(lengths, sealed)))

    def nbytes_by(self) -> dict[str, int]:
        layers = list(self.codes.values())
        return {
            "keys": sum(k[0].nbytes for k, _ in layers),
            "values": sum(v[0].nbytes for _, v in layers),
            "scales": sum(c.nbytes for both in layers for kv in both for c in kv[1:]),
            "tail": sum(x.nbytes for both in self.tail.values() for x in both),
        }

    @property
    def nbytes_in_use(self) -> int:
        return sum(self._bytes_of(i, self.lengths, self.sealed[i]) for i in self.codes)
