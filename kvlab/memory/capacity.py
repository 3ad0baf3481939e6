"""Does it fit, and how far does it go: fits(), max_batch(), max_seq_len(). Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from .catalog import find_gpu
from .estimate import Estimate, estimate
from .reading import ConfigError, check_whole

FARTHEST = 2**30  # tokens or sequences past which the search calls it unlimited


@dataclass(frozen=True)
class Fit:
    """Whether an estimate fits a memory, as a truth value; `free_bytes` is negative by what is missing."""

    estimate: Estimate
    memory_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - self.estimate.total_bytes

    def __bool__(self) -> bool:
        return self.free_bytes >= 0


def memory_bytes(memory) -> int:
    """Bytes of a card by name ("t4", as its driver reports them), or a number of bytes itself."""
    if isinstance(memory, str):
        return find_gpu(memory)["memory_mib"] * 2**20
    return check_whole("memory in bytes", memory)


def fits(model_or_config, memory, batch_size: int = 1, seq_len=1024, **options) -> Fit:
    """Whether it fits on each GPU of this memory (a card's name, or bytes). options: those of estimate().

    Raises ConfigError where the weights are not known: then nothing can be said; give params.
    """
    found = estimate(model_or_config, batch_size, seq_len, **options)
    if found.total_bytes is None:
        raise ConfigError(f"{found.model}: {found.warnings[-1]}")
    return Fit(found, memory_bytes(memory))


def max_batch(model_or_config, memory, seq_len: int = 1024, **options) -> int | None:
    """The most sequences of seq_len tokens that fit; 0 when not even one does, None when there is no limit."""
    check_whole("seq_len", seq_len)
    return _most(lambda n: bool(fits(model_or_config, memory, n, seq_len, **options)))


def max_seq_len(model_or_config, memory, batch_size: int = 1, **options) -> int | None:
    """The longest sequences, batch_size of them, that fit; 0 when none does, None when length costs nothing.

    The memory's limit alone: a model may be made for fewer positions.
    """
    return _most(lambda n: bool(fits(model_or_config, memory, batch_size, n, **options)))


def kv_tokens(model_or_config, kv_bytes: int, **options) -> int | None:
    """How many tokens of one sequence a KV cache of kv_bytes holds: what engines call their cache's size."""
    check_whole("kv_bytes", kv_bytes)

    def enough(n):
        found = estimate(model_or_config, 1, n, **options)
        return found.kv_cache_bytes + found.state_bytes <= kv_bytes

    return _most(enough)


def _most(enough) -> int | None:
    """The largest n with enough(n), found by doubling and halving: bytes grow with n."""
    if not enough(1):
        return 0
    low = 1
    while low < FARTHEST and enough(2 * low):
        low *= 2
    if low >= FARTHEST:
        return None
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low
