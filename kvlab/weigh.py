"""A model on the scales without its memory: meta tensors have shapes, dtypes and sizes, and no data.

The same GPT and the same caches run on the meta device. Every operation works out the shape of its result, the meter of
kvlab.measure counts the storage that it would take, and nothing is allocated: a 7B model fits a laptop.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from kvlab.caches import make_cache
from kvlab.config import ModelConfig
from kvlab.measure import Memory, live_tensors_bytes, memory
from kvlab.model import GPT


@dataclass(frozen=True)
class Weighed:
    """Bytes. weights: parameters. cache: keys, values and what belongs to them, after the prompt.

    prefill, decode: the most that one pass needs for a moment beside weights and cache: its activations, and for a
    cache that copies itself its second copy. peak: the most at any moment, all together.
    """

    weights: int
    cache: int
    prefill: int
    decode: int
    peak: int


class FusedAttention(TorchFunctionMode):
    """Counts attention as a fused kernel takes memory (FlashAttention, arXiv 2205.14135): its output and no scores.

    For meta tensors alone: the output has a shape and no values.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, _, v = args[:3]
        if q.device.type != "meta":
            raise ValueError(f"FusedAttention only works out sizes, on meta tensors; these are on {q.device}")
        return q.new_empty(*q.shape[:-1], v.shape[-1])


def on_meta(config: ModelConfig, dtype: torch.dtype = torch.float16) -> GPT:
    """The model without data: its parameters have their sizes and take no memory."""
    with torch.device("meta"):
        return GPT(config).to(dtype)


@torch.no_grad()
def weigh(
    config: ModelConfig, batch_size: int = 1, seq_len: int = 1024, kind: str = "full", *,
    dtype: torch.dtype = torch.float16, attention: str = "fused", prefill_chunk: int | None = None, **options,
) -> Weighed:  # fmt: skip
    """Sizes of a prompt of seq_len - 1 tokens and one decode step, so that seq_len tokens are held at the end.

    kind, options: of make_cache; "growing", "full" or "paged" (the others choose slots by value, and meta tensors have
    none). attention: "fused", or "dense" as the plain formula does it, scores in fp32. prefill_chunk: tokens at once.
    """
    if attention not in ("fused", "dense"):
        raise ValueError(f"attention={attention!r} must be 'fused' or 'dense'")
    if kind not in ("growing", "full", "paged"):
        raise ValueError(f"kind={kind!r} does not run without values; 'growing', 'full' and 'paged' do")
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len} must be at least 2: a prompt and one more token")
    model = on_meta(config, dtype)
    cache = make_cache(kind, model, batch_size, seq_len, **options)
    ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta")
    weights, at_once = live_tensors_bytes(model, device="meta"), prefill_chunk or seq_len
    with memory("meta") as m, FusedAttention() if attention == "fused" else nullcontext():
        for start in range(0, seq_len - 1, at_once):
            model(ids[:, start : min(start + at_once, seq_len - 1)], cache, logits_to_keep=1)
        held, prefill = m.live, m.peak - m.live
        decode = _peak_of(m, lambda: model(ids[:, -1:], cache)) - m.live
    return Weighed(weights, held, prefill, decode, weights + m.peak)


def _peak_of(m: Memory, step) -> int:
    """The most bytes live while step() runs."""
    before = len(m.timeline)
    step()
    return max(e.live for e in m.timeline[before:])
