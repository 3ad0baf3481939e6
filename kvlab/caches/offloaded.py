"""Keys and values kept in another memory, usually the host's, and brought over layer by layer."""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, bytes_per_token
from kvlab.caches.full import FullCache


class OffloadedCache(FullCache):
    """A full cache that lives on `device` (default "cpu"), while the model computes where its keys arrive.

    For its step each layer's S old tokens are copied to the compute device, where attention sees them beside the new
    ones; the new ones are copied home. So the compute device holds one layer at a time instead of all, and each step
    moves the whole cache over the bus once (FlexGen, arXiv 2303.06865; transformers' offloaded caches).
    With CUDA the home is pinned memory, and a second stream brings the next layer while this one computes: then the
    device holds two layers at a time. Where the home is the compute device itself, as on a machine without a GPU, this
    is a full cache: nothing is moved, and nothing is saved. where() says which of the two it is.
    Bytes: as in a full cache, all at home. On the compute device 0 between steps; during one temporary_peak at most:
    B*(S + T)*one for the layer at work, and as much again for the one under way.
    bytes_moved: per layer and step B*S*one to the compute device and N*one back, with B rows, S the tokens of the
    longest row before the step, N the new tokens of all rows, `one` the bytes of a token's key and value in a layer.
    Copied: the B*S*one among them. Read: as in a full cache.
    """

    def __init__(self, batch_size: int = 1, max_length: int = 1024, device: str | torch.device = "cpu"):
        super().__init__(batch_size, max_length)
        self.home = home_device(device)
        self.bytes_moved = self.temporary_peak = 0
        self._coming: dict[int, tuple] = {}  # layer -> (k, v, event or None): on the compute device, or on its way

    def _away(self, device: torch.device) -> bool:
        """Is the home another device than the one that computes?"""
        return device != self.home

    def _ahead(self, device: torch.device) -> bool:
        """Is the next layer brought while this one computes?"""
        return device.type == "cuda"

    # ---- one step

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        if layer not in self.k:
            self.k[layer], self.v[layer] = self._room(k, k.device), self._room(v, k.device)
        if not self._away(k.device):
            return super()._write(layer, k, v, step)
        if layer not in self._coming:
            self._fetch(layer, step, k.device)
        K, V, arrived = self._coming.pop(layer)
        if arrived is not None:
            torch.cuda.current_stream(k.device).wait_event(arrived)
        rows, columns = step.real
        slots = step.pos[rows, columns]
        for here, new in ((K, k), (V, v)):
            here[rows, :, slots] = new[rows, :, columns]
        after = [i for i in sorted(self.k) if i > layer]
        if after and self._ahead(k.device):
            self._fetch(after[0], step, k.device)
        self._send(layer, K, V, step)
        coming = sum(x.nbytes for pair in self._coming.values() for x in pair[:2])
        self.temporary_peak = max(self.temporary_peak, K.nbytes + V.nbytes + coming)
        self.bytes_read += sum(step.after) * bytes_per_token(k, v)
        return View(K, V, self.view_pos, all_visible=step.uniform and step.pos.shape[1] == 1)

    def _fetch(self, layer: int, step: Step, device: torch.device) -> None:
        """Copy a layer's old tokens to the compute device, into temporaries with room for the new ones."""
        S, n = max(step.start), max(step.after)
        with copying(device) as stream:
            pair = []
            for home in (self.k[layer], self.v[layer]):
                B, n_kv, _, D = home.shape
                here = home.new_empty(n, B, n_kv, D, device=device).permute(1, 2, 0, 3)
                self._copy(here[:, :, :S], home[:, :, :S])
                here[:, :, S:] = 0  # slots that a shorter row leaves empty hold finite values
                pair.append(here)
            self._coming[layer] = (*pair, stream.record_event() if stream else None)
        moved = self.batch_size * S * bytes_per_token(*pair)
        self.bytes_moved += moved
        self.bytes_copied += moved

    def _send(self, layer: int, K: Tensor, V: Tensor, step: Step) -> None:
        """Copy the new tokens home."""
        for home, here in ((self.k[layer], K), (self.v[layer], V)):
            if step.uniform:  # a block of memory on both sides
                new = slice(step.start[0], step.after[0])
                with copying(K.device):
                    self._copy(home[:, :, new], here[:, :, new])
            else:
                rows, columns = step.real
                slots = step.pos[rows, columns]
                tokens = torch.empty(len(rows), home.shape[1], home.shape[3], dtype=home.dtype, device=home.device)
                self._copy(tokens, here[rows, :, slots], wait=True)
                home[rows.to(home.device), :, slots.to(home.device)] = tokens
        self.bytes_moved += (sum(step.after) - sum(step.start)) * bytes_per_token(K, V)

    def _copy(self, to: Tensor, what: Tensor, wait: bool = False) -> None:
        """All that crosses from one device to the other goes through here."""
        pinned = self.home.type == "cpu" and "cuda" in (to.device.type, what.device.type)
        to.copy_(what, non_blocking=pinned and not wait)

    def _finish(self, step: Step) -> None:
        self._coming.clear()

    def _undo(self, step: Step) -> None:
        self._coming.clear()

    # ---- at home

    def _room(self, like: Tensor, device: torch.device) -> Tensor:
        """Zeros (B, n_kv, max_length, D) at home, to be used from `device`. In memory tokens come first, so that S of
        them are one block."""
        B, n_kv, _, D = like.shape
        pin = device.type == "cuda" and self.home.type == "cpu"
        room = torch.zeros(self.max_length, B, n_kv, D, dtype=like.dtype, device=self.home, pin_memory=pin)
        return room.permute(1, 2, 0, 3)

    def _settle(self) -> None:
        """Wait for what is still on its way home."""
        if self.device is not None and self.device.type == "cuda":
            copy_stream(self.device).synchronize()

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        self._settle()
        super()._clear(rows.to(self.home), pos.to(self.home))

    def _reorder(self, rows: list[int]) -> None:
        self._settle()
        for held in (self.k, self.v):
            for layer, x in held.items():
                moved = x[rows]
                held[layer] = self._room(moved, self.device)
                held[layer].copy_(moved)

    def fork(self) -> KVCache:
        self._settle()
        twin = super().fork()
        twin._reorder(list(range(self.batch_size)))  # a copy of pinned memory is not pinned
        return twin

    # ---- bytes

    def nbytes_on(self) -> dict[str, int]:
        """Bytes held on each device between two steps."""
        on = {str(self.home): self.nbytes}
        return on if self.device is None else {str(self.device): 0, **on}

    def where(self) -> str:
        """One sentence: what is kept where, and what that saves."""
        if self.device is None:
            return f"keys and values will be kept on {self.home}"
        if not self._away(self.device):
            return f"keys and values are kept on {self.home}, where the model computes: nothing is moved or saved"
        at_once = "two" if self._ahead(self.device) else "one"
        return (
            f"keys and values are kept on {self.home}; {self.device} holds {at_once} of {self._layers} layers at a time"
        )


def home_device(device) -> torch.device:
    """The device with its index, if keys and values can be kept there. Raises ValueError."""
    try:
        home = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ImportError):
        raise ValueError(f"device={device!r} is not there; 'cpu' always is") from None
    if home.type == "meta":
        raise ValueError("device='meta' keeps no values; 'cpu' is the usual home")
    return home


@functools.cache
def copy_stream(device: torch.device):
    """The one stream of all copies between a CUDA device and the homes of its caches."""
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def copying(device: torch.device):
    """Copies inside run beside the computation, after all that was asked of it so far; elsewhere than on CUDA, in turn.

    The waiting makes three things safe. New tokens are computed before they are sent home. Temporaries come from this
    stream's memory and are freed when their last use has been asked for, so what takes their place waits for that use.
    And a layer is sent home before it is fetched again, both being on this stream.
    """
    if device.type != "cuda":
        yield None
        return
    stream = copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream
