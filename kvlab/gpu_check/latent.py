"""Latent attention on the device: both forms, with caches, against the uncached model in float64 on the CPU.

Limits as in logits.py: ROOM times the rounding of the dtype, measured on the expanded form without a cache; a lossy
cache against the same cache in float64 on the CPU. And a control that must fail.
"""

from __future__ import annotations

import torch

from kvlab.check.runs import OnePass
from kvlab.config import ModelConfig
from kvlab.cost import FORMS
from kvlab.gpu_check.logits import PLAN, ROOM, ForgetsFirst
from kvlab.gpu_check.setup import GROUP, SINKS, WINDOW, Check, Variant, feed, random_ids, worst
from kvlab.mla import set_form
from kvlab.model import GPT

CACHES = (
    Variant("paged", "paged", "exact", (("block_size", 16),)),
    Variant("sliding + sinks", "sliding", "window", (("window", WINDOW), ("sinks", SINKS))),
    Variant("int8", "quantized", "lossy", (("group_size", GROUP), ("residual_length", GROUP))),
)


def make_latent(device, dtype: torch.dtype, size: str) -> GPT:
    """As make_model of setup.py, with 8 times as many numbers in a token's keys and values as in its latent."""
    C, n_layers, H, R, D = {"tiny": (64, 2, 4, 32, 16), "small": (512, 3, 16, 256, 64)}[size]
    config = ModelConfig(
        vocab_size=512, hidden_size=C, num_hidden_layers=n_layers, num_attention_heads=H, q_lora_rank=C // 2,
        kv_lora_rank=R, qk_nope_head_dim=D, qk_rope_head_dim=D // 2, v_head_dim=D,
    )  # fmt: skip
    model = GPT(config, seed=1)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(1.5 * p.shape[1] ** -0.5 / 0.02)
    return model.to(device, dtype)


def check_latent(device, dtypes, size: str):
    """-> Checks: each form without a cache and with each of CACHES, and the bytes that a token takes."""
    N = max(map(sum, zip(*PLAN)))
    ids = random_ids(3, N, 512, seed=7)
    for dtype in dtypes:
        part = f"latent attention, {str(dtype).removeprefix('torch.')}"
        model, exact = make_latent(device, dtype, size), make_latent("cpu", dtype, size).double()
        right = {"exact": exact(ids), "window": exact(ids, OnePass(3, WINDOW, SINKS))}
        twin = {v: feed(exact, v.make(exact, 3, N), ids, PLAN) for v in CACHES if v.rule == "lossy"}
        noise = None
        for form in FORMS[::-1]:  # expanded first: it sets the limit
            set_form(model, form)
            off = float((model(ids.to(device)).cpu().double() - right["exact"]).abs().max())
            noise = off if noise is None else noise
            ok = off < float("inf") if form == "expanded" else off <= ROOM * noise
            limit = None if form == "expanded" else ROOM * noise
            yield Check(part, f"{form}, no cache", ok, off, limit, "logit")
            for v in CACHES:
                cache = v.make(model, 3, N)
                got, limit, want = feed(model, cache, ids, PLAN), ROOM * noise, right.get(v.rule)
                if v.rule == "lossy":
                    limit += 2 * worst(twin[v], right["exact"])
                    want = right["exact"].clone()
                    for at, x in twin[v].items():
                        want[at] = x
                value = worst(got, want)
                yield Check(part, f"{form}, {v.name}", value <= limit, value, limit, "logit")
            value = worst(feed(model, ForgetsFirst(3), ids, PLAN), right["exact"])
            yield Check(
                part, f"{form}, control: forgets token 0", value > ROOM * noise, value, ROOM * noise, "logit",
                "must exceed the limit",
            )  # fmt: skip
        cache = Variant("full", "full", "exact").make(model, 3, N)
        feed(model, cache, ids, PLAN)
        formula = 3 * N * model.config.kv_bytes_per_token(dtype.itemsize)
        yield Check(part, "bytes of a full cache", cache.nbytes == formula, cache.nbytes, formula, "bytes")
