"""A ring buffer: the last `window` tokens, and the first `sinks`, whatever the length of the text."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View, rope, rope_angles
from kvlab.caches.base import KVCache, Step, bytes_per_token
from kvlab.config import check_int


class SlidingWindowCache(KVCache):
    """window + sinks slots. Token p < sinks stays in slot p; any other lives in slot sinks + (p - sinks) % window.

    "Window W" is W keys, the query's own included. What leaves the window is overwritten (Mistral's rolling buffer);
    the first `sinks` tokens stay (StreamingLLM, arXiv 2309.17453).
    sinks_at "text":  every key keeps its absolute position.
    sinks_at "cache": positions count within the cache, as in StreamingLLM: a query past window + sinks sees sink j at
                      distance window + sinks - 1 - j. Distances inside the window do not change, so only the sinks'
                      keys are turned by what is missing, each time from the originals.
    The window holds in every layer, also in those whose model would see everything.
    A chunk of T > 1 tokens sees the old slots and its own T keys; then the ring keeps what it should.
    Bytes: keys, values B*(window + sinks)*n_kv*D*itemsize per layer; positions none, they follow from the length;
    with sinks_at="cache" the sinks' original keys once more ("sink_keys").
    """

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int | None = None,
        window: int = 256,
        sinks: int = 0,
        sinks_at: str = "text",
        rope_freq: Tensor | None = None,
    ):
        super().__init__(batch_size)  # max_length is accepted and not needed: the text may be endless
        check_int("window", window)
        check_int("sinks", sinks, 0)
        if sinks_at not in ("text", "cache"):
            raise ValueError(f"sinks_at={sinks_at!r} must be 'text' (absolute positions) or 'cache' (StreamingLLM)")
        if sinks_at == "cache" and sinks and rope_freq is None:
            raise ValueError("sinks_at='cache' turns stored keys and needs rope_freq: let make_cache hand it over")
        self.window, self.sinks, self.slots = window, sinks, window + sinks
        self.forgets_after = self.slots
        self.turn_sinks, self.rope_freq = sinks_at == "cache" and sinks > 0, rope_freq
        self.k: dict[int, Tensor] = {}  # layer -> (B, n_kv, slots, D)
        self.v: dict[int, Tensor] = {}
        self.sink_k: dict[int, Tensor] = {}  # layer -> (B, n_kv, sinks, D), as they were stored
        self.high = [0] * batch_size  # the longest each row has been: older slots are overwritten up to there
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def for_model(cls, model, batch_size, max_length, **options):
        options.setdefault("window", model.config.sliding_window or 256)
        if model.config.kv_lora_rank is not None and options.get("sinks_at") == "cache" and options.get("sinks"):
            raise ValueError(
                "sinks_at='cache' turns keys, and latent attention keeps its turned ones apart: use 'text'"
            )
        return cls(batch_size, max_length, rope_freq=model.rope_freq, **options)

    def max_chunk(self, T: int) -> int:
        if not self.turn_sinks:
            return T
        # past window + sinks each query sees the sinks turned by another angle, so one token at a time
        return min(T, *(max(1, self.slots - n) for n in self.lengths)) if T > 1 else T

    def positions(self, lengths: list[int], device=None) -> Tensor:
        """The position that each slot holds after `lengths` tokens -> (B, slots), -1 = empty. The ring in one line."""
        n = torch.tensor(lengths, device=device)[:, None]
        slot = torch.arange(self.slots, device=device)
        turns = ((n - 1 - slot) // self.window).clamp(min=0)  # times that the ring has passed the slot
        pos = torch.where(slot < self.sinks, slot, slot + turns * self.window)
        return torch.where(slot < n, pos, -1)

    def _begin(self, step: Step) -> None:
        device = step.pos.device
        self.used = min(max(step.start), self.slots)
        rows, columns = step.real
        pos = step.pos[rows, columns]
        if step.pos.shape[1] > self.window:  # a chunk that overtakes itself: only its last tokens, and sinks, stay
            oldest = torch.tensor([n - self.window for n in step.after], device=device)
            keep = (pos < self.sinks) | (pos >= oldest[rows])
            rows, columns, pos = rows[keep], columns[keep], pos[keep]
        self.rows, self.columns = rows, columns
        self.at = torch.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % self.window)
        self.in_place = step.pos.shape[1] == 1  # one token takes the slot of the one that leaves its window
        if self.in_place:
            self.view_pos = self.positions(step.after, device)[:, : min(max(step.after), self.slots)]
        else:
            self.view_pos = torch.cat((self.positions(step.start, device)[:, : self.used], step.pos), 1)
        if self.turn_sinks:
            shift = [[max(0, n - self.slots)] for n in step.after]
            shifted = any(s for (s,) in shift)  # never in the first step, so that the dtype is known
            self.angles = (
                rope_angles(torch.tensor(shift, device=device), self.rope_freq, self.dtype) if shifted else None
            )

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        if layer not in self.k:
            self.k[layer] = k.new_zeros(*k.shape[:2], self.slots, k.shape[3])
            self.v[layer] = v.new_zeros(*v.shape[:2], self.slots, v.shape[3])
            if self.turn_sinks:
                self.sink_k[layer] = k.new_zeros(*k.shape[:2], self.sinks, k.shape[3])
        K, V = self.k[layer], self.v[layer]
        one = bytes_per_token(k, v)
        if self.turn_sinks and self.angles is not None:
            K[:, :, : self.sinks] = rope(self.sink_k[layer], self.angles)
        if not self.in_place and self.used:  # before the ring forgets what this chunk's first queries still see
            view_k, view_v = torch.cat((K[:, :, : self.used], k), 2), torch.cat((V[:, :, : self.used], v), 2)
            self.bytes_copied += self.batch_size * self.used * one
        if max(step.after) > self.slots and self.used:
            self._saved[layer] = K[self.rows, :, self.at], V[self.rows, :, self.at]  # for _undo
        new_k = k[self.rows, :, self.columns]
        K[self.rows, :, self.at] = new_k
        V[self.rows, :, self.at] = v[self.rows, :, self.columns]
        if self.turn_sinks and min(step.start) < self.sinks:
            first = self.at < self.sinks
            self.sink_k[layer][self.rows[first], :, self.at[first]] = new_k[first]
        if self.in_place:
            n = self.view_pos.shape[1]
            view_k, view_v = K[:, :, :n], V[:, :, :n]
        elif not self.used:
            view_k, view_v = k, v
        self.bytes_read += sum(min(n, self.slots) for n in step.after) * one
        return View(view_k, view_v, self.view_pos, self.window, self.sinks, all_visible=self.in_place and step.uniform)

    def _finish(self, step: Step) -> None:
        self.high = [max(h, n) for h, n in zip(self.high, step.after)]
        self._saved.clear()

    def _undo(self, step: Step) -> None:
        for layer, (k, v) in self._saved.items():
            self.k[layer][self.rows, :, self.at] = k
            self.v[layer][self.rows, :, self.at] = v
        self._saved.clear()
        for layer, k in self.sink_k.items():
            self.k[layer][:, :, : self.sinks] = k  # not turned; the next step turns them if it must

    def _reorder(self, rows: list[int]) -> None:
        for held in (self.k, self.v, self.sink_k):
            for layer in held:
                held[layer] = held[layer][rows]
        self.high = [self.high[r] for r in rows]

    def _largest_rewind(self, row: int) -> int:
        n, high = self.lengths[row], self.high[row]
        # a query needs the window - 1 keys before it; the ring holds the last `window` of the longest text so far
        return n if high <= self.slots else max(0, n - (high - 1))

    def _rewind(self, n: list[int]) -> None:
        self.high = [0 if x == length else h for h, x, length in zip(self.high, n, self.lengths)]

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        at = torch.where(pos < self.sinks, pos, self.sinks + (pos - self.sinks) % self.window)
        # after a failed step the slot may hold, restored, the token that it would have taken the place of
        empty = self.positions(self.lengths, pos.device)[rows, at] < 0
        empty |= pos < torch.tensor(self.high, device=pos.device)[rows]
        for x in (*self.k.values(), *self.v.values()):
            x[rows[empty], :, at[empty]] = 0

    def nbytes_by(self) -> dict[str, int]:
        held = {"keys": self.k, "values": self.v, "positions": {}, "sink_keys": self.sink_k}
        return {name: sum(x.nbytes for x in by_layer.values()) for name, by_layer in held.items()}

    @property
    def nbytes_in_use(self) -> int:
        tokens = sum(min(n, self.slots) for n in self.lengths)
        return sum(tokens * bytes_per_token(self.k[i], self.v[i]) for i in self.k)
