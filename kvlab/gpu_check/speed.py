"""Tokens/s of every variant, peak memory, and which attention kernels ran. Measured, never asserted."""

from __future__ import annotations

import re

import torch

from kvlab.gpu_check.setup import random_ids, variants_of
from kvlab.measure import Timing, memory, time_call
from kvlab.measure.sweep import free, out_of_memory
from kvlab.measure.watch import Watch

WINDOW = 256
LARGER = {
    "window": WINDOW,
    "group_size": 64,
    "residual_length": 64,
    "budget": 480,
}  # sizes of practice, where the prompt has as many


def speed_of(model, B: int, prompt: int, new: int, repeats: int) -> list[dict]:
    """-> one dict per variant: prefill seconds, decode seconds per step, tokens/s, bytes, peak bytes, kernels."""
    ids = random_ids(B, prompt + new, model.config.vocab_size, seed=5).to(model.device)
    rows = []
    for v in (None, *variants_of(model.device)):
        row = {"name": v.name if v else "no cache", "kind": v.kind if v else "none", "batch": B, "prompt": prompt}
        try:
            rows.append(
                row
                | (_cached(model, v, ids, prompt, new, repeats) if v else _uncached(model, ids, prompt, new, repeats))
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            rows.append(row | {"status": "did not fit"})
        free()
    return rows


def _uncached(model, ids, prompt: int, new: int, repeats: int) -> dict:
    """One step at the middle length stands for all: its cost grows nearly linearly over so few tokens."""
    middle = prompt + new // 2

    def first():
        return model(ids[:, :prompt], logits_to_keep=1)

    def step():
        return model(ids[:, :middle], logits_to_keep=1)

    device = model.device
    prefill = time_call(first, repeats=repeats, warmup=1, device=device)
    decode = time_call(step, repeats=repeats, warmup=1, device=device)
    with memory(device) as m:
        step()
    return {
        "prefill_s": prefill.median, "step_s": decode.median, "step_quartiles_s": decode.quartiles, "status": "ok",
        "tokens_per_s": len(ids) / decode.median, "nbytes": 0, "peak_bytes": m.peak,
        "attention": {"prefill": kernels(first, device), "decode": kernels(step, device)},
        "note": f"each step recomputes; sampled at {middle} tokens",
    }  # fmt: skip


def _cached(model, v, ids, prompt: int, new: int, repeats: int) -> dict:
    device, B = model.device, len(ids)
    options = {name: LARGER[name] for name, _ in v.options if name in LARGER and prompt >= WINDOW}
    length = prompt + new
    prefill, steps, nbytes, used = [], [], 0, {}
    for turn in range(repeats + 1):  # the first one warms up
        cache = v.make(model, B, length, **options)
        p = time_call(lambda c=cache: model(ids[:, :prompt], c, logits_to_keep=1), repeats=1, warmup=0, device=device)
        model(ids[:, prompt : prompt + 1], cache)

        def decode(c=cache):
            for i in range(prompt + 1, length):
                model(ids[:, i : i + 1], c)

        d = time_call(decode, repeats=1, warmup=0, device=device)
        if turn:
            prefill.append(p.median)
            steps.append(d.median / (new - 1))
        nbytes = cache.nbytes
        del cache, decode
    with memory(device) as m:
        cache = v.make(model, B, length, **options)
        model(ids[:, :prompt], cache, logits_to_keep=1)
        model(ids[:, prompt : prompt + 1], cache)
    peak = m.peak
    del cache
    few = prompt if v.rule != "turned" else 8  # turned sinks take one token at a time: a few will do
    used["prefill"] = kernels(lambda: model(ids[:, :few], v.make(model, B, length, **options)), device)
    cache, at = v.make(model, B, length, **options), iter(range(prompt, length))
    model(ids[:, :prompt], cache, logits_to_keep=1)

    def decode_one():
        i = next(at)
        return model(ids[:, i : i + 1], cache)

    used["decode"] = kernels(decode_one, device)
    step = Timing(tuple(steps))
    return {
        "prefill_s": Timing(tuple(prefill)).median, "step_s": step.median, "step_quartiles_s": step.quartiles,
        "tokens_per_s": B / step.median, "nbytes": nbytes, "peak_bytes": peak, "attention": used, "status": "ok",
        "options": options, "note": "",
    }  # fmt: skip


BACKENDS = {  # the operation that SDPA hands over to -> what people call it; without one it is taken apart: "math"
    "_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_efficient_attention": "memory-efficient",
    "_scaled_dot_product_attention_math_for_mps": "MPS",
}


def kernels(fn, device: torch.device) -> dict:
    """Run fn again -> {"backend": which attention SDPA chose, "kernels": names of the CUDA kernels that it ran}."""
    seen = []

    def run(func, args, kwargs):
        seen.append(func._overloadpacket.__name__)
        return func(*args, **kwargs)

    with Watch(run):
        fn()
    labels = list(dict.fromkeys(BACKENDS[name] for name in seen if name in BACKENDS))
    found = []
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            fn()
            torch.cuda.synchronize(device)
        pattern = re.compile("flash|fmha|attention|sdpa", re.IGNORECASE)
        names = {event.key for event in prof.key_averages()}
        found = sorted(n[:100] for n in names if pattern.search(n) and not n.startswith(("aten::", "cuda")))[:4]
    return {"backend": ", ".join(labels) or "math", "kernels": found}
