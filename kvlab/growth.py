"""What each further token costs, variant by variant: seconds and FLOPs of the steps of a generation.

The ids are given, not chosen by the model: which token it is does not change what it costs. Step n has n tokens in
view, the new one included. Batch 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.cost import Flops
from kvlab.measure import SampledSteps, Timing, count_flops, live_tensors_bytes, time_call, time_steps


@torch.no_grad()
def every_step(model, ids: Tensor, variants: dict[str, dict], repeats: int = 3) -> dict[str, list[float]]:
    """Seconds of every cached step of a generation of ids (1, L): {kind: [step 1, ..., step L]}.

    variants: {cache kind: its options}. Each repeat is a whole generation with a new cache; the kinds take turns, and
    of each step the median over the repeats is kept, so that one slow moment of the machine spoils no curve.
    """
    _check(ids)
    runs: dict[str, list[list[float]]] = {kind: [] for kind in variants}
    kinds = list(variants)
    model(ids[:, :1], make_cache(kinds[0], model, 1, 1, **variants[kinds[0]]))  # the first call of all is slow
    for turn in range(repeats):
        for i in range(len(kinds)):
            kind = kinds[(turn + i) % len(kinds)]
            cache = make_cache(kind, model, 1, ids.shape[1], **variants[kind])
            runs[kind].append(
                [
                    time_call(
                        lambda n=n, c=cache: model(ids[:, n : n + 1], c), repeats=1, warmup=0, device=ids.device
                    ).min
                    for n in range(ids.shape[1])
                ]
            )
    return {kind: [statistics.median(step) for step in zip(*taken)] for kind, taken in runs.items()}


@torch.no_grad()
def uncached_steps(model, ids: Tensor, lengths: Iterable[int], repeats: int = 3) -> SampledSteps:
    """Seconds of single uncached steps at the sampled `lengths`, at most L of ids (1, L): each recomputes all."""
    _check(ids)
    return time_steps(lambda n: model(ids[:, :n], logits_to_keep=1), lengths, repeats=repeats, device=ids.device)


@torch.no_grad()
def count_steps(model, ids: Tensor, kind: str, lengths: Iterable[int], **options) -> dict[int, Flops]:
    """Counted FLOPs of single steps of the generation of ids (1, L): {tokens in view: Flops}.

    kind "none" feeds all tokens in view; a cache is filled with the earlier ones, uncounted, and fed the last.
    """
    _check(ids)
    counted = {}
    for n in lengths:
        cache, feed = None, ids[:, :n]
        if kind != "none":
            cache, feed = make_cache(kind, model, 1, n, **options), ids[:, n - 1 : n]
            if n > 1:
                model(ids[:, : n - 1], cache, logits_to_keep=1)
        with count_flops(model) as f:
            model(feed, cache, logits_to_keep=1)
        counted[n] = Flops(f.projections, f.attention)
    return counted


@torch.no_grad()
def decode_step(model, kind: str, length: int, repeats: int = 3, **options) -> dict:
    """One decode step with about `length` tokens in view: {"label", "weights", "cache": bytes it must read,
    "timing": Timing, "seconds": its median}. Each repeat adds a token, as decoding does."""
    cache = make_cache(kind, model, 1, length + repeats + 1, **options)
    ids = torch.ones(1, length, dtype=torch.long, device=model.device)
    model(ids, cache, logits_to_keep=1)
    before = cache.bytes_read
    timing = time_call(lambda: model(ids[:, :1], cache), repeats=repeats, warmup=1, device=ids.device)
    return {
        "label": f"{length:,} tokens in view",
        "weights": live_tensors_bytes(model),
        "cache": (cache.bytes_read - before) / (repeats + 1),
        "timing": timing,
        "seconds": timing.median,
    }


@torch.no_grad()
def one_pass(model, width: int, repeats: int = 3) -> Timing:
    """A prompt of `width` tokens into a new full cache, all at once."""
    ids = torch.ones(1, width, dtype=torch.long, device=model.device)

    def prefill():
        model(ids, make_cache("full", model, 1, width), logits_to_keep=1)

    return time_call(prefill, repeats=repeats, device=ids.device)


def running_sum(steps: Iterable[float]) -> list[float]:
    """Seconds from the first step up to and including each."""
    total, sums = 0.0, []
    for step in steps:
        total += step
        sums.append(total)
    return sums


def half_octaves(last: int, first: int = 1) -> list[int]:
    """first, ..., last in steps of the square root of 2: dense enough to interpolate a curve that bends."""
    lengths, x = {first, last}, float(first)
    while x < last:
        lengths.add(round(x))
        x *= 2**0.5
    return sorted(lengths)


def _check(ids: Tensor) -> None:
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(f"ids must be (1, L), one sequence of at least one token, not {tuple(ids.shape)}")
