"""A cache's life under the meter: how many bytes are live after each token, and for a moment while it is computed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import contextmanager
from typing import NamedTuple

import torch

from kvlab.caches import make_cache
from kvlab.measure import Memory, memory
from kvlab.staircase import Height


class Stage(NamedTuple):
    """What a cache holds after `name`: bytes live, the most for a moment on the way there, and the part in use."""

    name: str
    live: int
    peak: int
    in_use: int


@torch.no_grad()
def generation(model, kind: str, prompt: int, new: int, **options) -> tuple[list[Height], list[int], Memory]:
    """`new` decode steps after a prompt of ones -> (Height after each pass, bytes in use after each, the meter).

    Counted storages on every device, beside the model's weights: cache, and each step's activations at its peak. The
    text is given, not chosen: which token it is takes no other memory. options: of make_cache.
    """
    ids = torch.ones(1, prompt, dtype=torch.int64, device=model.device)
    rows, used = [], []
    with memory(model.device, of=[model], counted=True) as m:
        cache = make_cache(kind, model, 1, prompt + new, **options)
        for n in range(prompt, prompt + new + 1):
            top = _most(m, lambda n=n: model(ids if n == prompt else ids[:, :1], cache, logits_to_keep=1))
            rows.append(Height(n, m.live, top))
            used.append(cache.nbytes_in_use)
    return rows, used, m


@torch.no_grad()
def stages(model, kind: str, prompt: int, new: int, forget: int, **options) -> list[Stage]:
    """Make, fill, append, trim, free: a cache's life, counted storages without the model's weights."""
    ids = torch.ones(1, prompt, dtype=torch.int64, device=model.device)
    rows = []
    with memory(model.device, of=[model], counted=True) as m:
        cache = make_cache(kind, model, 1, prompt + new, **options)

        def stage(name, action):
            top = _most(m, action)
            rows.append(Stage(name, m.live, top, cache.nbytes_in_use if cache is not None else 0))

        def append():
            for _ in range(new):
                model(ids[:, :1], cache)

        def drop():
            nonlocal cache
            cache = None

        stage("made", lambda: None)
        stage(f"prompt of {prompt}", lambda: model(ids, cache, logits_to_keep=1))
        stage(f"{new} tokens appended", append)
        stage(f"{forget} tokens rewound", lambda: cache.rewind(forget))
        stage("cache deleted", drop)
    return rows


def transformers_generation(implementation: str, prompt: int, new: int, layers: int = 4) -> list[Height]:
    """generate() of Hugging Face transformers on a tiny random Llama (fp32, CPU) -> Height after each of its passes.

    implementation: "dynamic" (DynamicCache, torch.cat) or "static" (StaticCache, allocated once). Raises ImportError
    where transformers is missing.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=8,
                         head_dim=64, vocab_size=64, max_position_embeddings=4096, pad_token_id=0,
                         bos_token_id=None, eos_token_id=None)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rows: list[Height] = []
    seen = 0
    with memory(of=[model]) as m:

        def after(module, args, kwargs, out):
            nonlocal seen
            top = max((e.live for e in m.timeline[seen:]), default=m.live)
            seen = len(m.timeline)
            rows.append(Height(prompt + len(rows), m.live, top))

        hook = model.register_forward_hook(after, with_kwargs=True)
        ids = torch.ones(1, prompt, dtype=torch.int64)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new + 1, do_sample=False,
            cache_implementation=implementation,
        )  # fmt: skip
        hook.remove()
    return rows


def from_trace(trace: Iterable[dict]) -> tuple[list[int], list[int]]:
    """One device's trace of torch.cuda.memory._snapshot() -> bytes of (tensors, segments) after each event.

    Its actions: alloc and free_completed for tensors, segment_alloc and segment_free for what the driver gave. Both
    count from the moment the recording began.
    """
    live = reserved = 0
    tensors, segments = [], []
    for event in trace:
        sign = {"alloc": 1, "free_completed": -1, "segment_alloc": 1, "segment_free": -1}.get(event["action"], 0)
        if event["action"].startswith("segment"):
            reserved += sign * event["size"]
        else:
            live += sign * event["size"]
        tensors.append(live)
        segments.append(reserved)
    return tensors, segments


def record_cuda(step) -> tuple[list[int], list[int]]:
    """Runs step() under CUDA's memory recorder -> as from_trace. Without a CUDA device: RuntimeError."""
    if not torch.cuda.is_available():
        raise RuntimeError("the memory recorder belongs to CUDA's allocator, and this machine has no CUDA device")
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
    try:
        step()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return from_trace(snapshot["device_traces"][torch.cuda.current_device()])


@torch.no_grad()
def one_step(model, kind: str, tokens: int, **options) -> Memory:
    """One decode step with `tokens` tokens held before it, event by event: the meter, counting from that moment."""
    ids = torch.ones(1, tokens, dtype=torch.int64, device=model.device)
    cache = make_cache(kind, model, 1, tokens + 1, **options)
    model(ids, cache, logits_to_keep=1)
    with memory(model.device, of=[model, cache], counted=True) as m:
        model(ids[:, :1], cache)
    return m


@contextmanager
def quiet():
    """What C++ code writes to the terminal inside the block is dropped: a profiler announces itself there."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _most(m: Memory, step) -> int:
    """The most bytes live while step() runs."""
    before, now = len(m.timeline), m.live
    step()
    return max([now, *(e.live for e in m.timeline[before:])])
