"""The cache's allocations over a generation, in closed form: which tensor is made and freed at which token. No torch.

The model feeds a prompt, then one token at a time. What is told here is what the caches of kvlab.caches do:

growing   each layer's keys and values are made anew by torch.cat, one token longer, and the old ones freed after it:
          for a moment one layer exists twice. Positions too (8 bytes a token of each sequence, once).
full      all of it at the first token, nothing after.
sliding   window slots at the first token, nothing after.
paged     a block of block_size tokens whenever a sequence needs one, in all layers at once. (The pool behind them is
          allocated once, before; these are the blocks taken from it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvlab.config import ModelConfig

KINDS = ("growing", "full", "sliding", "paged")


class Change(NamedTuple):
    """While the step runs that leaves `tokens` tokens in each sequence, `tensor` is made (+) or freed (-)."""

    tokens: int
    tensor: str
    nbytes: int


class Height(NamedTuple):
    """Bytes of the cache when a step has ended with `tokens` tokens, and the most while it ran."""

    tokens: int
    held: int
    peak: int


def changes(
    kind: str, config: ModelConfig, prompt: int, new: int, batch_size: int = 1, itemsize: int = 2,
    window: int = 256, block_size: int = 16,
) -> Iterator[Change]:  # fmt: skip
    """Every allocation of a prompt and `new` decode steps, in order. The last step leaves prompt + new tokens."""
    _check(kind, prompt, new)
    if kind == "growing":
        yield from _growing(config, prompt, new, batch_size, itemsize)
    elif kind == "paged":
        block, taken = batch_size * block_size * config.kv_bytes_per_token(itemsize), 0
        for n in range(prompt, prompt + new + 1):
            while taken * block_size < n:
                yield Change(n, f"block {taken}", block)
                taken += 1
    else:
        slots = prompt + new if kind == "full" else window
        for layer in range(config.num_hidden_layers):
            for which in "kv":
                yield Change(prompt, f"{which}{layer}", batch_size * slots * _half(config, itemsize))


def _growing(config, prompt, new, batch_size, itemsize) -> Iterator[Change]:
    half = batch_size * _half(config, itemsize)  # one token's keys, or values, in one layer
    for n in range(prompt, prompt + new + 1):
        first = n == prompt
        yield Change(n, f"positions to {n}", 8 * batch_size * n)
        for layer in range(config.num_hidden_layers):
            yield Change(n, f"k{layer} to {n}", half * n)
            yield Change(n, f"v{layer} to {n}", half * n)
            if not first:
                yield Change(n, f"k{layer} to {n - 1}", -half * (n - 1))
                yield Change(n, f"v{layer} to {n - 1}", -half * (n - 1))
        if not first:
            yield Change(n, f"positions to {n - 1}", -8 * batch_size * (n - 1))


def heights(
    kind: str, config: ModelConfig, tokens: Sequence[int], length: int, batch_size: int = 1, itemsize: int = 2,
    window: int = 256, block_size: int = 16,
) -> list[Height]:  # fmt: skip
    """The cache after each of `tokens` decode steps of a text that ends with `length` tokens, without walking there."""
    _check(kind, 1, 0)
    each = batch_size * config.kv_bytes_per_token(itemsize)
    rows = []
    for n in tokens:
        held = peak = (
            each * {"growing": n, "full": length, "sliding": window, "paged": -(-n // block_size) * block_size}[kind]
        )
        if kind == "growing":  # at the last layer all others are one token longer, and this one is there twice
            peak = held + each // config.num_hidden_layers * (n - 1) + 8 * batch_size * (2 * n - 1)
            held += 8 * batch_size * n
        rows.append(Height(n, held, peak))
    return rows


def running(events: Sequence[Change]) -> list[int]:
    """Bytes live after each change."""
    live, sums = 0, []
    for e in events:
        live += e.nbytes
        sums.append(live)
    return sums


def _half(config: ModelConfig, itemsize: int) -> int:
    heads, key, value = config.kv_shape
    if key != value:
        raise ValueError(f"keys of {key} and values of {value} numbers: the staircase is drawn for equal ones alone")
    return heads * key * itemsize


def _check(kind: str, prompt: int, new: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} has no staircase here; there are {', '.join(KINDS)}")
    if prompt < 1 or new < 0:
        raise ValueError(f"prompt={prompt}, new={new}: at least one token of prompt, and no less than no step")
