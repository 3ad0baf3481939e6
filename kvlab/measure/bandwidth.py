"""How fast this machine reads memory: the floor under every decode step.

A decode step with batch 1 does about one multiplication for each weight it reads, so it can be no faster than reading
the weights and the cache once (Shazeer, Fast Transformer Decoding, arXiv:1911.02150; Pope et al., arXiv:2211.05102).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from .about import best_device
from .timing import Timing, interleaved


@dataclass(frozen=True)
class Bandwidth:
    """bytes_per_second as read; `how` names the operation that reached it, nbytes what it read, timing its repeats."""

    bytes_per_second: float
    how: str
    nbytes: int
    timing: Timing

    def seconds(self, nbytes: float) -> float:
        """The shortest time in which this machine can read `nbytes`."""
        return nbytes / self.bytes_per_second

    def __str__(self):
        return f"{self.bytes_per_second / 1e9:.1f} GB/s ({self.how} over {self.nbytes / 2**20:.0f} MiB)"


def bandwidth(device=None, nbytes: int | None = None, repeats: int = 5) -> Bandwidth:
    """Measure reading: the fastest of three operations that read a large float32 matrix once and write next to nothing.

    nbytes: size of what is read. It must be far larger than the last-level cache, or the cache answers in the memory's
            place. None: 512 MiB, at most an eighth of the memory.

    Uses torch.get_num_threads() threads on a CPU, as the model does. Raises ValueError for nbytes below 1 MiB or above
    half of the memory.
    """
    device = torch.device(device) if device is not None else best_device()
    total = device_memory(device)
    if nbytes is None:
        nbytes = min(512 * 2**20, total // 8)
    if not 2**20 <= nbytes <= total // 2:
        raise ValueError(f"nbytes={nbytes:,} must lie between 1 MiB and half of the {total / 2**30:.1f} GiB of memory")
    columns = 4096
    matrix = torch.ones(nbytes // (4 * columns), columns, device=device)  # written, so that every page is really there
    vector = torch.ones(columns, device=device)
    readers = {
        "matrix x vector": lambda: torch.mv(matrix, vector),
        "sum": lambda: matrix.sum(),
        "row maxima": lambda: matrix.amax(1),
    }
    timings = interleaved(readers, repeats=repeats, warmup=1, device=device)
    # The fastest operation, by its median: a floor must not be lifted by an operation that is itself slow.
    how = min(timings, key=lambda name: timings[name].median)
    read = matrix.numel() * matrix.element_size()
    return Bandwidth(read / timings[how].median, how, read, timings[how])


def device_memory(device=None) -> int:
    """Bytes of memory that the device has: the card's own, or the machine's (shared with everything else that runs)."""
    device = torch.device(device) if device is not None else best_device()
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return 8 * 2**30
