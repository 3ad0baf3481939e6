"""advise(): what to do about "CUDA out of memory", in order, with the bytes each step saves and its price.

The questions come in the order that saves work: is it the weights or the cache? is the cache reserved or padded rather
than used? may its numbers be smaller? may it forget? and only then: more memory, or less work. Every figure is an
estimate() of this model, card, batch and length; nothing is a rule of thumb. Loads no torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from .capacity import fits, max_batch, max_seq_len, memory_bytes
from .estimate import Estimate, estimate, resolve
from .layers import Attention
from .reading import ConfigError

WINDOW = 1024  # tokens a window keeps, in the suggestion


@dataclass(frozen=True)
class Step:
    """One strategy: bytes saved on each GPU, bytes needed with it alone, whether that fits, and its price in words."""

    name: str
    saves_bytes: int
    total_bytes: int
    fits: bool
    price: str
    how: str


@dataclass(frozen=True)
class Advice:
    """cause: "fits", "weights", "cache" or "both". steps: in the order to try them. plan: names that together fit."""

    estimate: Estimate
    memory_bytes: int
    cause: str
    diagnosis: str
    steps: tuple[Step, ...]
    plan: tuple[str, ...]
    max_batch: int | None
    max_seq_len: int | None


def advise(model_or_config, memory, batch_size: int = 1, seq_len=1024, **options) -> Advice:
    """Strategies for this model on this memory (a card's name, or bytes), each weighed by itself. options: estimate's.

    Raises ConfigError where the weights are not known.
    """
    room = memory_bytes(memory)
    arch, _, known = resolve(model_or_config, options.get("mla", True), options.get("windows", True))
    options = {"params": known, **options} if known else options
    now = fits(arch, room, batch_size, seq_len, **options).estimate
    ragged = isinstance(seq_len, list | tuple)
    longest = max(seq_len) if ragged else seq_len

    def total(**changed) -> int:
        return estimate(arch, **{"batch_size": batch_size, "seq_len": seq_len, **options, **changed}).total_bytes

    steps = []

    def consider(name, price, how, bytes_needed):
        saved = now.total_bytes - bytes_needed
        if saved > 0:
            steps.append(Step(name, saved, bytes_needed, bytes_needed <= room, price, how))

    cache = now.kv_cache_bytes + now.state_bytes
    rest = now.activation_bytes + now.context_bytes
    weights_alone = now.weights_bytes + rest > room
    if now.total_bytes <= room:
        cause = "fits"
    elif weights_alone:
        cause = "both" if cache > now.weights_bytes else "weights"
    else:
        cause = "cache"

    def weights_steps():
        for dtype, price in (("int8", "little quality"), ("int4", "some quality; AWQ, GPTQ or NF4 weights")):
            if dtype != now.weights_dtype:
                how = "load_in_8bit" if dtype == "int8" else "an AWQ or GPTQ checkpoint, or load_in_4bit"
                consider(f"{dtype} weights", price, how, total(weights_dtype=dtype))

    def cache_steps():
        if options.get("layout", "padded") != "paged":
            price = "none in quality; an engine that pages, or the paged cache"
            consider("paging", price, "vLLM, SGLang, TensorRT-LLM page by default", total(layout="paged"))
        for dtype, price, how in (
            ("fp8", "almost none in quality", "--kv-cache-dtype fp8 (vLLM, TGI)"),
            ("q8_0", "almost none in quality", "--cache-type-k q8_0 --cache-type-v q8_0 (llama.cpp)"),
            ("int4/64", "some quality; keys per channel lose least (KIVI)", "cache_implementation='quantized'"),
        ):
            consider(f"{dtype} cache", price, how, total(kv_dtype=dtype))
        if longest > WINDOW and any(isinstance(x, Attention) and x.kind == "full" for x in arch.layers):
            kept = [min(n, WINDOW + 4) for n in seq_len] if ragged else WINDOW + 4
            price = f"what lies more than {WINDOW} tokens back is forgotten; the sinks keep the text fluent"
            consider(f"window {WINDOW} + 4 sinks", price, "a sliding cache (StreamingLLM)", total(seq_len=kept))
        if arch.max_positions and isinstance(seq_len, int) and options.get("layout") == "reserved":
            consider("reserve what you use", "longer texts are refused", "--max-model-len", total(max_seq_len=longest))
        two_layers = 2 * now.kv_cache_bytes // max(1, sum(layer.kept(1) for layer in arch.layers))
        offload = now.total_bytes - now.kv_cache_bytes + two_layers  # the one at work and the one on its way
        price = "slower: a layer's cache crosses the bus for every token"
        consider("offload the cache", price, "cache_implementation='offloaded'", offload)

    def other_steps():
        tp = 2 * now.tensor_parallel
        with suppress(ConfigError):  # heads that do not divide
            shared = total(tensor_parallel=tp)
            consider(f"{tp} GPUs", "a second card, and its traffic", f"--tensor-parallel-size {tp}", shared)
        if batch_size > 1 and isinstance(seq_len, int):
            smaller = max_batch(arch, room, seq_len, **options)
            if smaller and smaller < batch_size:
                price = "more passes, lower throughput"
                consider(f"batch of {smaller}", price, f"batch_size={smaller}", total(batch_size=smaller))
        if isinstance(seq_len, int):
            shorter = max_seq_len(arch, room, batch_size, **options)
            if shorter and shorter < seq_len:
                price = "longer texts are cut"
                consider(f"length of {shorter}", price, f"max_length={shorter}", total(seq_len=shorter))

    for part in (weights_steps, cache_steps) if weights_alone else (cache_steps, weights_steps):
        part()
    other_steps()
    return Advice(
        estimate=now,
        memory_bytes=room,
        cause=cause,
        diagnosis=_diagnosis(now, room, cause, cache, arch.max_positions, longest),
        steps=tuple(steps),
        plan=_plan(steps, total, now, room),
        max_batch=max_batch(arch, room, seq_len, **options) if isinstance(seq_len, int) else None,
        max_seq_len=max_seq_len(arch, room, batch_size, **options) if isinstance(seq_len, int) else None,
    )


def _diagnosis(now: Estimate, room: int, cause: str, cache: int, positions: int | None, longest: int) -> str:
    """The cause in two sentences, with its numbers."""

    def gib(n):
        return f"{n / 2**30:.2f} GiB"

    rest = gib(now.activation_bytes + now.context_bytes)
    parts = f"weights {gib(now.weights_bytes)}, cache {gib(cache)}, allowance {rest}"
    if cause == "fits":
        text = f"It fits: {parts}; {gib(room - now.total_bytes)} of {gib(room)} stay free."
    elif cause == "cache":
        text = f"The cache is the cause: {parts}. Without it the model would fit in {gib(room)}."
    elif cause == "weights":
        text = f"The weights are the cause: {parts}. They do not fit in {gib(room)} even with an empty cache."
    else:
        text = f"Weights and cache are both too large: {parts}, and there are {gib(room)}."
    if positions and longest > positions:
        text += f" {longest} tokens are also more than the {positions} positions that the model is made for."
    return text


def _plan(steps: list[Step], total, now: Estimate, room: int) -> tuple[str, ...]:
    """The fewest steps, in order, that fit together; empty when it fits already, or when nothing here does."""
    if now.total_bytes <= room:
        return ()
    options = {
        "paging": {"layout": "paged"},
        "fp8 cache": {"kv_dtype": "fp8"},
        "int4/64 cache": {"kv_dtype": "int4/64"},
        "int8 weights": {"weights_dtype": "int8"},
        "int4 weights": {"weights_dtype": "int4"},
    }
    chosen: dict[str, dict] = {}
    for step in steps:
        if step.fits:
            return (step.name,)
    for step in steps:
        if step.name in options:
            rival = {"int4/64 cache": "fp8 cache", "int4 weights": "int8 weights"}.get(step.name)
            chosen.pop(rival, None)
            chosen[step.name] = options[step.name]
            if total(**{k: v for o in chosen.values() for k, v in o.items()}) <= room:
                return tuple(chosen)
    return ()
