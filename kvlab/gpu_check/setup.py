"""What every part of the GPU check shares: results, variants, the model, and the dtypes that the device computes in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.caches import make_cache
from kvlab.caches.base import KVCache
from kvlab.config import ModelConfig
from kvlab.model import GPT

WINDOW, SINKS, GROUP = 16, 4, 16


@dataclass
class Check:
    """One thing that was tried. value and limit are in `unit`; ok says whether it went as it must."""

    part: str
    name: str
    ok: bool
    value: float | None = None
    limit: float | None = None
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Variant:
    """A cache under test. rule: "exact"; "window" and "turned": the model under that mask; "twin": the same cache in
    float64 on the CPU; "lossy": that too, with room for codes, or scores, that tip."""

    name: str
    kind: str
    rule: str
    options: tuple = ()

    def make(self, model, batch_size: int, max_length: int, **more) -> KVCache:
        return make_cache(self.kind, model, batch_size, max_length, **dict(self.options) | more)


def _quantized(name: str, bits) -> Variant:
    options = (("k_bits", bits), ("v_bits", bits), ("group_size", GROUP), ("residual_length", GROUP))
    return Variant(name, "quantized", "exact" if bits == 16 else "lossy", options)


VARIANTS = (
    Variant("growing", "growing", "exact"),
    Variant("full", "full", "exact"),
    Variant("sliding", "sliding", "window", (("window", WINDOW),)),
    Variant("sliding + sinks", "sliding", "window", (("window", WINDOW), ("sinks", SINKS))),
    Variant(
        "sliding + turned sinks", "sliding", "turned", (("window", WINDOW), ("sinks", SINKS), ("sinks_at", "cache"))
    ),
    Variant("paged", "paged", "exact", (("block_size", 16),)),
    Variant("paged, blocks of 3", "paged", "exact", (("block_size", 3),)),
    _quantized("quantized, 16 bits", 16),
    _quantized("int8", 8),
    _quantized("int4", 4),
    _quantized("int2", 2),
    _quantized("fp8 e4m3", "fp8"),
    _quantized("fp8 e5m2", "fp8_e5m2"),
    Variant("shared layers", "shared", "twin"),
    Variant("offloaded", "offloaded", "exact"),
    Variant("heavy hitters", "heavy_hitter", "lossy", (("budget", WINDOW + SINKS),)),
    Variant("random eviction", "random", "twin", (("budget", WINDOW + SINKS),)),
    Variant("first and last", "first_last", "window", (("budget", WINDOW + SINKS), ("first", SINKS))),
)


def make_model(device, dtype: torch.dtype, size: str) -> GPT:
    """Random weights, scaled so that attention is not uniform. size: "tiny", "small" (checks) or "large" (speed)."""
    C, n_layers, H, n_kv = {"tiny": (64, 2, 4, 2), "small": (512, 3, 8, 2), "large": (1024, 8, 16, 4)}[size]
    config = ModelConfig(
        vocab_size=512, hidden_size=C, num_hidden_layers=n_layers, num_attention_heads=H, num_key_value_heads=n_kv
    )
    model = GPT(config, seed=1)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(1.5 * C**-0.5 / 0.02)
    return model.to(device, dtype)


def dtypes_of(device: torch.device) -> tuple[list[torch.dtype], str]:
    """The dtypes to check, and a sentence about one left out: bf16 needs units of its own (Ampere and later)."""
    dtypes, note = [torch.float32, torch.float16, torch.bfloat16], ""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        dtypes.pop()
        note = f"bf16 left out: {torch.cuda.get_device_name(device)} has no units for it"
    elif device.type == "mps":
        try:
            one = torch.ones(2, 2, device=device, dtype=torch.bfloat16)
            one @ one
        except (RuntimeError, TypeError) as error:
            dtypes.pop()
            note = f"bf16 left out: {error}"
    return dtypes, note


def has_fp8(device: torch.device) -> bool:
    """Can the device turn numbers into fp8 and back? Every CUDA card can, with or without units for it; MPS cannot."""
    try:
        return bool(torch.ones(1, device=device).to(torch.float8_e4m3fn).float().item() == 1)
    except (RuntimeError, TypeError):
        return False


def variants_of(device: torch.device) -> list[Variant]:
    return [v for v in VARIANTS if "fp8" not in v.name or has_fp8(device)]


def random_ids(B: int, N: int, vocab: int, seed: int) -> Tensor:
    return torch.randint(vocab, (B, N), generator=torch.Generator().manual_seed(seed))


def feed(model, cache, ids: Tensor, plan, at: list[int] | None = None) -> dict[tuple[int, int], Tensor]:
    """Feed plan[step][row] tokens at each step, padded at the left -> {(row, position): logits, float64 on the CPU}."""
    at, got = at if at is not None else [0] * len(plan[0]), {}
    for lengths in plan:
        T = max(lengths)
        step = torch.zeros(len(at), T, dtype=torch.int64)
        for b, n in enumerate(lengths):
            step[b, T - n :] = ids[b, at[b] : at[b] + n]
        pos = cache.next_positions(lengths)
        logits = model(step.to(model.device), cache, pos).cpu().double()
        for b, n in enumerate(lengths):
            got |= {(b, at[b] + i): logits[b, T - n + i] for i in range(n)}
            at[b] += n
    return got


def worst(got: dict, right: Tensor) -> float:
    """Largest |difference| of a logit; infinite if there is a NaN. right: (B, N, vocab) float64 on the CPU."""
    diffs = torch.stack([(x - right[at]).abs().max() for at, x in got.items()])
    return float(diffs.nan_to_num(nan=float("inf")).max())
