"""A pasted log -> what each memory figure in it means, and what the figures imply together. Loads no torch.

One table of lines per engine; every pattern names its numbers, and explain() compares them with the catalog's models.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from .architecture import architecture
from .catalog import models
from .engines import BLOCK, GIB, MIB
from .formats import kv_formats
from .reading import ConfigError

_N = r"([\d.,]+)"
_UNIT = "(GiB|MiB|KiB|bytes)"
# engine, pattern, names of its groups, what it means
_LINES = [
    ("vllm", rf"#?\s*(?:GPU|CUDA|cuda|rocm) blocks:\s*{_N}", ["blocks"], "blocks in the GPU's pool"),
    ("vllm", rf"#?\s*CPU blocks:\s*{_N}", ["cpu_blocks"], "blocks in host memory for sequences that are swapped out"),
    ("vllm", rf"GPU KV cache size:\s*{_N} tokens", ["tokens"], "tokens that the pool holds, all sequences together"),
    ("vllm", rf"Available KV cache memory:\s*{_N}\s*GiB", ["kv_gib"], "memory left for keys and values on each GPU"),
    ("vllm", rf"reserved for KV Cache is\s*{_N}\s*GiB", ["kv_gib"], "memory left for keys and values on each GPU"),
    ("vllm", rf"{_N}\s*GiB reserved for KV", ["kv_gib"], "memory left for keys and values on each GPU"),
    ("vllm", rf"kv_cache_size\s*=\s*{_N}\s*GiB", ["kv_gib"], "memory left for keys and values on each GPU"),
    ("vllm", rf"Maximum concurrency for {_N} tokens per request:\s*{_N}x", ["max_model_len", "concurrency"],
     "how many sequences of the longest allowed length fit at once"),
    ("vllm", rf"max seq len \({_N}\)", ["max_model_len"], "the longest sequence asked for"),
    ("vllm", rf"{_N}\s*GiB KV cache is needed", ["needed_gib"], "what one sequence of that length would take"),
    ("vllm", rf"available (?:KV cache memory )?\(?{_N}\s*GiB", ["kv_gib"],
     "memory left for keys and values on each GPU"),
    ("vllm", rf"estimated maximum model length is {_N}", ["longest"], "the longest sequence that would fit"),
    ("vllm", rf"stored in (?:the )?KV cache \({_N}\)", ["tokens"], "tokens that the pool holds"),
    ("vllm", rf"[Ss]etting attention block size to {_N} tokens", ["block_size"],
     "tokens a block, raised until it is as large as a recurrent layer's state"),
    ("vllm", rf"[Mm]odel (?:weights take|loading took)\s*{_N}\s*GiB", ["weights_gib"], "weights on each GPU"),
    ("vllm", rf"Loading model weights took\s*{_N}\s*GB", ["weights_gib"], "weights on each GPU (GB here means GiB)"),
    ("llama.cpp", rf"\bKV buffer size\s*=\s*{_N} MiB", ["buffer_mib"], "the part of the cache on this device"),
    ("llama.cpp", rf"kv_cache.*: kv_size = {_N}", ["cells"], "tokens that the cache has room for"),
    ("llama.cpp", rf"(?<!recurrent: )size =\s*{_N} MiB \(\s*{_N} cells,\s*{_N} layers",
     ["kv_mib", "cells", "kv_layers"],
     "a cache of this many tokens for these layers; layers with a window get a cache of their own"),
    ("llama.cpp", rf"\bK \((\w+)\):?\s*{_N} MiB", ["k_type", "k_mib"], "keys, and their number format"),
    ("llama.cpp", rf"c\^KV \((\w+)\):\s*{_N} MiB", ["k_type", "k_mib"], "MLA's latents, for keys and values both"),
    ("llama.cpp", rf"(?<!\^K)V \((\w+)\):?\s*{_N} MiB", ["v_type", "v_mib"], "values, and their number format"),
    ("llama.cpp", rf"[Kk][Vv] self size\s*=\s*{_N} (?:MiB|MB)", ["self_mib"], "keys and values, all layers"),
    ("llama.cpp", rf"\bn_ctx\s*[=:]?\s*{_N}", ["n_ctx"], "tokens that the context has room for"),
    ("llama.cpp", rf"(?:RS buffer size|llama_memory_recurrent: size)\s*=\s*{_N} MiB", ["state_mib"],
     "recurrent states, the same at any length"),
    ("llama.cpp", rf'memory\.required\.kv="?{_N} GiB', ["kv_gib"], "keys and values, as Ollama plans them"),
    ("llama.cpp", rf"each KV slot takes\s*{_N} MiB", ["state_mib"], "one sequence's recurrent state"),
    ("sglang", rf"#tokens:\s*{_N}", ["tokens"], "tokens that the pool holds"),
    ("sglang", rf"\bK size:\s*{_N} GB", ["k_gib"], "keys (GB here means GiB)"),
    ("sglang", rf"\bV size:\s*{_N} GB", ["v_gib"], "values (GB here means GiB)"),
    ("sglang", rf"\bKV size:\s*{_N} GB", ["kv_gib"], "latent keys and values (GB here means GiB)"),
    ("sglang", rf"Load weight end\..*mem usage={_N} GB", ["weights_gib"], "weights on each GPU (GB here means GiB)"),
    ("sglang", rf"SWAKVPool mem usage: {_N} GB, swa size: {_N}, full size: {_N}",
     ["kv_gib", "swa_tokens", "full_tokens"],
     "two pools: layers with a window have room for fewer tokens (GB here means GiB)"),
    ("sglang", rf"conv_state size: {_N}\s?GB, ssm_state size: {_N}\s?GB", ["conv_gib", "ssm_gib"],
     "recurrent states of all sequences, the same at any length (GB here means GiB)"),
    ("sglang", rf"max_total_num_tokens={_N}", ["tokens"], "tokens that the pool holds"),
    ("tensorrt-llm", rf"Allocated\s*{_N} GiB for max tokens in paged KV cache \({_N}\)", ["kv_gib", "tokens"],
     "the pool, and the tokens that it holds"),
    ("tensorrt-llm", rf"Max tokens in paged KV cache: {_N}\. Allocating {_N} bytes", ["tokens", "kv_bytes"],
     "the tokens that the pool holds, and its size"),
    ("tensorrt-llm", rf"(?:KV cache primary pool: |\.primaryBlocks=){_N}", ["blocks"], "blocks in the GPU's pool"),
    ("tensorrt-llm", rf"Number of tokens per block:\s*{_N}", ["block_size"], "tokens a block"),
    ("lmdeploy", rf"\[BlockManager\].*\bblock_size = {_N} MB", ["block_mib"], "one block (MB here means MiB)"),
    ("lmdeploy", rf"\[BlockManager\].*\bmax_block_count = {_N}", ["blocks"], "blocks in the pool"),
    ("torch", rf"Tried to allocate {_N} {_UNIT}", ["asked", "asked_unit"], "the one tensor that did not fit"),
    ("torch", rf"total capacity of {_N} GiB", ["card_gib"], "the card's memory as the driver reports it"),
    ("torch", rf"{_N} GiB total capacity", ["card_gib"], "the card's memory as the driver reports it"),
    ("torch", rf"{_N} {_UNIT} already allocated", ["allocated", "allocated_unit"], "held by live tensors"),
    ("torch", rf"allocated; {_N} {_UNIT} free", ["free", "free_unit"], "left when it failed"),
    ("torch", rf"{_N} {_UNIT} reserved in total by PyTorch", ["reserved", "reserved_unit"], "taken by the allocator"),
    ("torch", rf"of which {_N} {_UNIT} is free", ["free", "free_unit"], "left when it failed"),
    ("torch", rf"{_N} {_UNIT} is allocated by PyTorch", ["allocated", "allocated_unit"], "held by live tensors"),
    ("torch", rf"{_N} {_UNIT} is reserved by PyTorch but unallocated", ["slack", "slack_unit"],
     "kept by the allocator without a tensor in it: fragmentation"),
]  # fmt: skip
_TEXT = {"k_type", "v_type", "asked_unit", "free_unit", "allocated_unit", "reserved_unit", "slack_unit"}


@dataclass(frozen=True)
class Finding:
    """One line's figures: `values` by name, the text that was matched, and its meaning."""

    engine: str
    values: dict
    text: str
    meaning: str


@dataclass(frozen=True)
class Report:
    """findings: line by line. values: all figures by name (the last one counts). implications: in sentences."""

    engine: str
    findings: tuple[Finding, ...]
    values: dict = field(repr=False)
    implications: tuple[str, ...]


def parse_log(text: str) -> list[Finding]:
    """Every memory figure in the text, in order. ConfigError when there is none of a known engine."""
    found = []
    for number, line in enumerate(text.splitlines()):
        for engine, pattern, names, meaning in _LINES:
            for match in re.finditer(pattern, line):
                values = {n: v if n in _TEXT else _number(v) for n, v in zip(names, match.groups())}
                if None not in values.values():
                    found.append((number, match.start(), Finding(engine, values, match.group(0).strip(" ,"), meaning)))
    if not found:
        known = "vLLM, llama.cpp, SGLang, TensorRT-LLM, LMDeploy and PyTorch"
        raise ConfigError(f"no line of a known engine in this log: looked for those of {known}")
    return [finding for _, _, finding in sorted(found, key=lambda f: f[:2])]


def explain(text: str) -> Report:
    """The findings of a log and what they imply: bytes a token, the models that this fits, concurrency, what to try."""
    findings = parse_log(text)
    engines = [f.engine for f in findings]
    engine = max(dict.fromkeys(engines), key=engines.count)
    values = {}
    for finding in findings:
        values |= finding.values
    parts = [f.values["buffer_mib"] for f in findings if "buffer_mib" in f.values]
    if parts and not values.keys() & {"kv_mib", "k_mib", "self_mib"}:
        values["self_mib"] = sum(parts)  # one line a device
    return Report(engine, tuple(findings), values, tuple(_implications(engine, findings, values)))


def _number(text: str):
    text = text.rstrip(".,").replace(",", "")
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None


def _bytes(values: dict) -> tuple[float, float] | None:
    """(bytes of keys and values, by how much the printed figure is rounded)."""
    if "kv_gib" in values:
        return values["kv_gib"] * GIB, _rounding(values["kv_gib"], GIB)
    if "k_gib" in values and "v_gib" in values:
        return (values["k_gib"] + values["v_gib"]) * GIB, 2 * _rounding(values["k_gib"], GIB)
    if "kv_bytes" in values:
        return values["kv_bytes"], 0
    if "k_mib" in values:
        return (values["k_mib"] + values.get("v_mib", 0)) * MIB, 0.01 * MIB
    if "self_mib" in values:
        return values["self_mib"] * MIB, 0.005 * MIB
    return None


def _rounding(value: float, unit: int) -> float:
    decimals = len(str(value).partition(".")[2]) if isinstance(value, float) else 0
    return 0.5 * 10**-decimals * unit if decimals else 0.5 * unit


def _implications(engine: str, findings, values: dict):
    block = values.get("block_size", BLOCK.get(engine, 1))
    tokens = values.get("tokens") or values.get("n_ctx") or values.get("cells")
    if values.get("blocks") == 0:
        yield "No block at all: weights and activations left no room for the cache."
    elif "blocks" in values:
        tokens = tokens or values["blocks"] * block
        yield f"{values['blocks']:,} blocks of {block} tokens hold {values['blocks'] * block:,} tokens."
    if "block_mib" in values:
        one = values["block_mib"] * MIB / block
        yield f"{values['block_mib']} MiB for {block} tokens: {one:,.0f} bytes a token" + _named(_who(one, one))
    if "cpu_blocks" in values and values["cpu_blocks"]:
        low, high = 4 * GIB / (values["cpu_blocks"] + 1) / 16, 4 * GIB / values["cpu_blocks"] / 16
        yield (
            f"If the swap space is vLLM's default of 4 GiB, a token takes between {low:,.0f} and {high:,.0f} bytes"
            + _named(_who(low, high))
        )
    caches = [f for f in findings if "kv_layers" in f.values]
    held = _bytes(values)
    if len(caches) > 1:
        total = sum(f.values["kv_mib"] for f in caches)
        yield f"{len(caches)} caches side by side: layers with a window keep fewer cells; together {total:,.2f} MiB."
    elif held and tokens:
        size, slack = held
        low, high = (size - slack) / (tokens + block), (size + slack) / tokens
        yield f"{size / GIB:.2f} GiB for {tokens:,} tokens: about {size / tokens:,.0f} bytes a token" + _named(
            _who(low, high, values.get("k_type"), values.get("v_type"))
        )
    if "concurrency" in values and tokens and "max_model_len" in values:
        ratio = tokens / values["max_model_len"]
        if abs(ratio - values["concurrency"]) <= 0.01 + 0.005 * ratio:
            yield f"{tokens:,} / {values['max_model_len']:,} = {ratio:.2f}: the pool over the longest text."
        else:
            yield "The concurrency is not tokens / length: windows or states make the token count a derived one."
    if "needed_gib" in values and "kv_gib" in values:
        yield (
            f"One sequence of {values.get('max_model_len', 0):,} tokens needs {values['needed_gib']} GiB and "
            f"{values['kv_gib']} GiB are there: lower --max-model-len, or try --kv-cache-dtype fp8."
        )
    if "concurrency" not in values and values.get("tokens", 0) < values.get("max_model_len", 0) and "tokens" in values:
        yield (
            f"One sequence may have {values['max_model_len']:,} tokens and the pool holds {values['tokens']:,}: "
            "lower --max-model-len, raise --gpu-memory-utilization, or try --kv-cache-dtype fp8."
        )
    if values.get("k_type") in ("f32", "fp32"):
        yield "The cache is in 32 bits: an f16 cache would take half of it."
    if "swa_tokens" in values:
        yield (
            f"Layers with a window hold {values['swa_tokens']:,} tokens, the others {values['full_tokens']:,}: "
            "no single number of bytes a token describes both."
        )
    if "ssm_gib" in values:
        states = values["ssm_gib"] + values["conv_gib"]
        yield f"{states:.2f} GiB are recurrent states: they grow with the sequences at once, not with their length."
    if "state_mib" in values:
        yield f"{values['state_mib']} MiB are recurrent states: they do not grow, and a smaller KV format leaves them."
    if "asked" in values:
        yield from _out_of_memory(values)


def _out_of_memory(values: dict):
    """What PyTorch's own message says about the kind of failure."""

    scale = {"GiB": 1024, "KiB": 1 / 1024, "bytes": 1 / MIB}

    def mib(name):
        value = values.get(name)
        return None if value is None else value * scale.get(values.get(f"{name}_unit"), 1)

    asked, free, slack = mib("asked"), mib("free"), mib("slack")
    if slack is None and "reserved" in values and "allocated" in values:
        slack = mib("reserved") - mib("allocated")
    yield f"PyTorch asked for {asked:,.0f} MiB at once" + (f" with {free:,.0f} MiB free." if free is not None else ".")
    if slack is not None and free is not None and slack + free >= asked:
        yield "Reserved but unallocated memory would have been enough: fragmentation; try expandable_segments:True."
    if asked < 512:
        yield "A small allocation failed: something that grows step by step filled the card, as a KV cache does."
    else:
        yield "A large allocation failed: a long prompt, or a cache that grows by torch.cat and exists twice."


@cache
def _catalog() -> list:
    """(name, query heads, ((layer, how many), ...)) of every model: its configuration is read once."""
    read = ((entry["name"].rsplit("/")[-1], architecture(entry["config"])) for entry in models())
    alike = ((name, arch, Counter(x for x in arch.layers if x.kind != "cross")) for name, arch in read)
    return [(name, arch.query_heads, tuple(layers.items())) for name, arch, layers in alike]


def _who(low: float, high: float, k_type=None, v_type=None) -> list[str]:
    """Models of the catalog whose token takes low to high bytes, in the likeliest format and on the fewest GPUs."""
    formats = {"fp16": "", "fp8": " in fp8", "fp32": " in 32 bits"}
    if k_type:
        both = k_type if v_type in (None, k_type) else f"{k_type}:{v_type}"
        try:
            if min(f.bits for f in kv_formats(both)) < 16:
                formats = {both: f" in {both}"}
        except ConfigError:  # a format that is not known here names no model
            return []
    for tp in (1, 2, 4, 8):
        for dtype, said in formats.items():
            out = []
            k, v = kv_formats(dtype)
            for name, heads, layers in _catalog():
                if heads and heads % tp:
                    continue
                try:
                    one = sum(n * layer.kv_bytes(1, k, v, tp) for layer, n in layers)
                except ConfigError:  # KV heads that this many GPUs cannot share
                    continue
                if low <= one <= high:
                    out.append(name + said + (f" on {tp} GPUs" if tp > 1 else ""))
            if out:
                return out
    return []


def _named(names: list[str]) -> str:
    if not names:
        return ". No model of the catalog has that: windows, states or another format may be at work."
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f", as {', '.join(names[:4])}{more} would."
