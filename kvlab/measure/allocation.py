"""Memory between two points: bytes live and peak bytes, with one meaning on CUDA, MPS and CPU.

Why a meter of our own? The two tools at hand are silent on a CPU. `tracemalloc` watches Python's allocator, which holds
a tensor's Python object of some bytes, while its numbers come from malloc. The operating system's resident set counts
pages, which malloc keeps or returns as it likes. PyTorch's caching allocators (CUDA, MPS) do keep books, so there we
read them. On a CPU we keep the books ourselves: under a dispatch mode every tensor that an operation makes passes by;
each storage counts once, however many views share it, and a weak reference tells when the last tensor, view or
autograd node has let it go.

What is counted is tensors. Scratch space that a kernel takes and returns inside one operation never becomes a tensor:
a CPU count does not see it. The allocators of CUDA and MPS do, and they round each block up (CUDA: to 512 bytes).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch

from .watch import Watch, storage_of, tensors_in


class Event(NamedTuple):
    """One change of the live bytes: after operation number `index`, named `op` ("free" when a storage died)."""

    index: int
    op: str
    live: int


class Memory:
    """What `memory()` yields. All sizes are bytes. `live` and `peak` count from the start of the block.

    start:     bytes live when the block began: the allocator's figure, or the tensors named in `of` where we count.
    live:      bytes live when the block ended minus start; negative if more was freed than made. Up to date inside the
               block too wherever there is a timeline.
    peak:      most bytes live at any moment minus start, never negative.
    timeline:  list of Event, one for each change; start + event.live is never negative.
    reserved:  bytes that the caching allocator holds from the driver, used or not; None where we count.
    method:    "counted storages", "CUDA allocator" or "MPS allocator, peak sampled after each operation".
    """

    def __init__(self, device: torch.device, method: str, start: int):
        self.device, self.method, self.start = device, method, start
        self.live = self.peak = 0
        self.timeline: list[Event] = []
        self.reserved: int | None = None

    def _record(self, index: int, op: str, live: int) -> None:
        if live != self.live:
            self.live, self.peak = live, max(self.peak, live)
            self.timeline.append(Event(index, op, live))

    def __repr__(self):
        return f"Memory(live={self.live:,}, peak={self.peak:,} bytes; {self.method} on {self.device})"


def memory(device="cpu", of: Iterable = (), timeline: bool = False, counted: bool = False):
    """A context manager that measures memory inside its block: `with memory("cuda") as m: ...; m.live, m.peak`.

    device:    "cpu", "cuda", "mps", or "meta" (counted like a CPU, so you can size a model that does not fit).
    of:        tensors, modules or caches alive at the start, so that m.start tells their size where we count storages.
               Without it the count starts at zero; their death inside the block is counted if an operation saw them.
    timeline:  on CUDA, also read the allocator after each operation. CPU and MPS always have a timeline.
    counted:   count storages on CUDA or MPS too, as on a CPU: exact tensor bytes without the allocator's rounding.

    Blocks may be nested. Tensors made inside torch.compile are seen on CUDA and MPS alone. On CUDA, entering a block
    resets the peak that torch.cuda.max_memory_allocated reports.
    Raises ValueError for a device that is not there.
    """
    device = torch.device(device)
    if counted or device.type in ("cpu", "meta"):
        return _Counting(device, of)
    if device.type == "cuda" and torch.cuda.is_available():
        return _Cuda(device, timeline)
    if device.type == "mps" and torch.backends.mps.is_available():
        return _Mps(device)
    raise ValueError(
        f"no memory to measure on device {str(device)!r}: use 'cpu', 'meta', or a 'cuda' or 'mps' that is there"
    )


class _Counting:
    """Counts unique storages as operations make them and as they die."""

    def __init__(self, device, of):
        self.device, self.of = device, list(of)
        self.alive: dict[int, tuple[weakref.ref, int]] = {}  # address of the StorageImpl -> (weak reference, bytes)
        self.ops = 0
        self.watch = Watch(self._run)

    def __enter__(self):
        self.m = Memory(self.device, "counted storages", live_tensors_bytes(*self.of, device=self.device))
        for tensor in tensors_in(self.of):
            self._see(tensor, "", new=False)
        self.of = ()  # a meter must not keep alive what it measures
        self.watch.__enter__()
        return self.m

    def __exit__(self, *exc):
        self.watch.__exit__(*exc)
        gc.collect()  # a tensor in a reference cycle is garbage; count what is really held
        self.alive.clear()

    def _run(self, func, args, kwargs):
        name = func._overloadpacket.__name__
        for tensor in tensors_in((args, kwargs)):
            # An argument nobody made here existed before. lift_fresh is how torch.tensor() presents a newborn.
            self._see(tensor, name, new=name == "lift_fresh")
        out = func(*args, **kwargs)
        self.ops += 1
        for tensor in tensors_in(out):
            self._see(tensor, name, new=True)
        return out

    def _see(self, tensor, op, new):
        if tensor.device.type != self.device.type or (storage := storage_of(tensor)) is None:
            return
        key, nbytes = storage._cdata, storage.nbytes()
        known = self.alive.get(key)
        if known is None:
            self.alive[key] = weakref.ref(storage, partial(self._freed, key)), nbytes
            change = nbytes if new else 0
        else:
            self.alive[key] = known[0], nbytes
            change = nbytes - known[1]  # resize_ and set_ change a storage in place
        self.m._record(self.ops, op, self.m.live + change)

    def _freed(self, key, _ref):
        if entry := self.alive.pop(key, None):
            self.m._record(self.ops, "free", self.m.live - entry[1])


class _Sampler(Watch):
    """Calls `sample(index, op)` after every operation."""

    def __init__(self, sample):
        super().__init__(self._run)
        self.sample, self.ops = sample, 0

    def _run(self, func, args, kwargs):
        out = func(*args, **kwargs)
        self.ops += 1
        self.sample(self.ops, func._overloadpacket.__name__)
        return out


class _Cuda:
    """Reads CUDA's caching allocator: exact live and peak bytes, kernels' scratch included."""

    running: list[
        _Cuda
    ] = []  # open blocks, outermost first: an inner one resets the peak, so the outer reads it before

    def __init__(self, device, timeline):
        self.device = device
        self.sampler = _Sampler(self._sample) if timeline else None

    def _sample(self, index, op):
        self.m._record(index, op, torch.cuda.memory_allocated(self.device) - self.m.start)

    def _fold(self):
        self.m.peak = max(self.m.peak, torch.cuda.max_memory_allocated(self.device) - self.m.start)

    def __enter__(self):
        for block in self.running:
            block._fold()
        torch.cuda.reset_peak_memory_stats(self.device)
        self.m = Memory(self.device, "CUDA allocator", torch.cuda.memory_allocated(self.device))
        self.running.append(self)
        if self.sampler:
            self.sampler.__enter__()
        return self.m

    def __exit__(self, *exc):
        if self.sampler:
            self.sampler.__exit__(*exc)
        gc.collect()
        self.running.remove(self)
        self._fold()
        self.m.live = torch.cuda.memory_allocated(self.device) - self.m.start
        self.m.reserved = torch.cuda.memory_reserved(self.device)


class _Mps:
    """Reads Metal's allocator after each operation: it keeps no peak, so ours is the highest figure sampled."""

    def __init__(self, device):
        self.device, self.sampler = device, _Sampler(self._sample)

    def _sample(self, index, op):
        self.m._record(index, op, torch.mps.current_allocated_memory() - self.m.start)

    def __enter__(self):
        torch.mps.synchronize()
        method = "MPS allocator, peak sampled after each operation"
        self.m = Memory(self.device, method, torch.mps.current_allocated_memory())
        self.sampler.__enter__()
        return self.m

    def __exit__(self, *exc):
        self.sampler.__exit__(*exc)
        gc.collect()
        torch.mps.synchronize()
        self._sample(self.sampler.ops, "end")
        self.m.reserved = torch.mps.driver_allocated_memory()


def live_tensors_bytes(*objs, device=None) -> int:
    """Bytes of the unique storages behind tensors, modules, caches, or lists and dicts of them.

    A storage counts once and whole: ten views of it cost nothing, and a view of ten rows holds all the rows. An object
    that is none of these is searched through its attributes. `device` limits the count to one device type ("cuda").
    Gradients are not followed.
    """
    kind = torch.device(device).type if device is not None else None
    storages = {}
    for tensor in tensors_in(objs):
        if kind in (None, tensor.device.type) and (storage := storage_of(tensor)) is not None:
            storages[storage._cdata] = storage
    return sum(storage.nbytes() for storage in storages.values())
