"""What inference engines print about their KV cache, predicted from a configuration. logs.py reads the same lines back.

Every engine holds the same keys and values; they differ in what they make of windows, in the unit they count, and in
what they round. Loads no torch.

    vLLM          a pool of blocks: floor(bytes / (block_size * bytes a token)); sliding layers counted like full ones
    llama.cpp     n_ctx cells; layers with a window get sequences * window + ubatch cells, padded to 256
    ik_llama.cpp  n_ctx cells for every layer, windows or not; K and V, or the latent alone with -mla
    SGLang        tokens, K and V apart, in GiB that it calls GB
    TensorRT-LLM  GiB for the most tokens
    LMDeploy      blocks of 64 tokens, in MiB that it calls MB
    transformers  continuous batching: blocks of 256 tokens
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .architecture import Architecture
from .estimate import estimate, resolve
from .formats import Format, kv_formats
from .layers import Attention, Latent, round_up
from .reading import ConfigError, check_whole

MIB, GIB = 2**20, 2**30
_NOTHING = Format("nothing", 0, 1)
# name in a log or a sentence -> the engine's rule
_ENGINES = {
    "ik_llama": "ik_llama.cpp",
    "llama.cpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
    "ollama": "llama.cpp",
    "sglang": "sglang",
    "tensorrt": "tensorrt-llm",
    "trt": "tensorrt-llm",
    "lmdeploy": "lmdeploy",
    "transformers": "transformers",
    "vllm": "vllm",
}
BLOCK = {"vllm": 16, "lmdeploy": 64, "transformers": 256, "sglang": 1, "tensorrt-llm": 32}


@dataclass(frozen=True)
class Prediction:
    """kv_bytes = k_bytes + v_bytes on each GPU (a latent counts as K); state_bytes beside them; line: as printed."""

    engine: str
    model: str
    tokens: int
    k_bytes: int
    v_bytes: int
    state_bytes: int
    block_size: int
    line: str

    @property
    def kv_bytes(self) -> int:
        return self.k_bytes + self.v_bytes

    @property
    def blocks(self) -> int:
        """Whole blocks that hold the tokens."""
        return -(-self.tokens // self.block_size)


def engine_name(text: str) -> str:
    """The engine behind "vllm (CPU backend)", "TensorRT-LLM", "llama-cpp-python", ...; ConfigError for no known one."""
    for part, name in _ENGINES.items():
        if part in text.lower():
            return name
    raise ConfigError(f"no known engine in {text!r}; known are {', '.join(sorted(set(_ENGINES.values())))}")


def predict(engine: str, model, tokens: int, kv_dtype="fp16", tensor_parallel: int = 1, **options) -> Prediction:
    """What `engine` allocates, on each GPU, so that its cache holds `tokens` tokens.

    model: as in estimate(), or a name as people write it beside a log: "DeepSeek-R1, MLA off", "DeepSeek-V3, -mla 3".
    options: sequences=1 and ubatch=512 (llama.cpp), block_size, mla=True, padded_mla=False (vLLM's 576 -> 640 values).
    """
    engine = engine_name(engine)
    model, said = split_label(model)
    known = {"sequences", "ubatch", "block_size", "mla", "padded_mla"}
    if unknown := set(options) - known:
        raise ConfigError(f"predict has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    options = {**said, **options}
    arch, name, _ = resolve(model, options.get("mla", True))
    if options.get("padded_mla"):
        arch = _padded(arch)
    check_whole("tokens", tokens)
    sequences = check_whole("sequences", options.get("sequences", 1))
    block = check_whole("block_size", options.get("block_size", BLOCK.get(engine, 1)))
    cells = _cells(engine, arch, tokens, sequences, check_whole("ubatch", options.get("ubatch", 512)))
    tp = check_whole("tensor_parallel", tensor_parallel)
    if arch.query_heads and arch.query_heads % tp:
        raise ConfigError(f"tensor_parallel={tp} does not divide the model's {arch.query_heads} attention heads")
    k, v = kv_formats(kv_dtype)
    k_bytes = sum(n * layer.token_bytes(k, _NOTHING, tp) for layer, n in zip(arch.layers, cells))
    v_bytes = sum(n * layer.token_bytes(_NOTHING, v, tp) for layer, n in zip(arch.layers, cells))
    state = sequences * sum(layer.state_bytes(tp) for layer in arch.layers)
    line = _line(engine, arch, tokens, k, v, k_bytes, v_bytes, state, block, cells)
    return Prediction(engine, name, tokens, k_bytes, v_bytes, state, block, line)


def split_label(model):
    """("DeepSeek-R1", {"mla": False}) from "DeepSeek-R1, MLA off": a name and what is said beside it."""
    if not isinstance(model, str) or "," not in model:
        return model, {}
    name, said = (part.strip() for part in model.split(",", 1))
    if re.fullmatch(r"mla off|-mla 0|no mla", said, re.IGNORECASE):
        return name, {"mla": False}
    if re.fullmatch(r"mla on|-mla [123]", said, re.IGNORECASE):
        return name, {"mla": True}
    raise ConfigError(
        f"{said!r} beside the model's name is not understood; known are 'MLA off' and '-mla 1' to '-mla 3'"
    )


def pool(kv_bytes: int, model, kv_dtype="fp16", tensor_parallel=1, block_size=16, padded_mla=False) -> int:
    """vLLM's number of blocks: whole blocks of all layers that kv_bytes on each GPU hold (for CPU blocks: swap space).

    Raises ConfigError for a model whose layers keep no tokens.
    """
    one = predict("vllm", model, 1, kv_dtype, tensor_parallel, block_size=block_size, padded_mla=padded_mla)
    if not one.kv_bytes:
        raise ConfigError(f"{one.model} keeps no keys and values, so there are no blocks to count")
    return check_whole("kv_bytes", kv_bytes) // (one.kv_bytes * block_size)


def hybrid_block_size(model, kv_dtype="fp16", tensor_parallel=1, align=16, state_itemsize=2) -> int:
    """vLLM's block size for a model with recurrent layers: as many tokens as make a page no smaller than a state.

    align * ceil(state page / (align * bytes of one token in one attention layer)); the state in the model's own dtype.
    """
    arch, name, _ = resolve(model)
    k, v = kv_formats(kv_dtype)
    states = [x.state_bytes(tensor_parallel) // 4 * state_itemsize for x in arch.layers if x.kind == "state"]
    tokens = [x.token_bytes(k, v, tensor_parallel) for x in arch.layers if isinstance(x, Attention | Latent)]
    if not states or not tokens:
        raise ConfigError(f"{name} does not mix attention with recurrent layers")
    return align * -(-max(states) // (align * min(tokens)))


def concurrency(blocks: int, block_size: int, max_model_len: int) -> float:
    """vLLM's "Maximum concurrency": how many sequences of max_model_len tokens the blocks hold."""
    return (
        check_whole("blocks", blocks)
        * check_whole("block_size", block_size)
        / check_whole("max_model_len", max_model_len)
    )


def _padded(arch: Architecture) -> Architecture:
    layers = tuple(
        Latent(round_up(x.rank + x.rope_dim, 128) - x.rope_dim, x.rope_dim, x.window, x.index_dim)
        if isinstance(x, Latent)
        else x
        for x in arch.layers
    )
    return Architecture(arch.family, layers, arch.query_heads, arch.config, arch.warnings, arch.encoder_len)


def _cells(engine: str, arch: Architecture, tokens: int, sequences: int, ubatch: int) -> list[int]:
    """Tokens that each layer gets room for."""
    kinds = arch.kinds
    windows = engine == "llama.cpp" and "sliding" in kinds and len(set(kinds) & {"full", "sliding"}) == 2
    cells = []
    for layer in arch.layers:
        window = getattr(layer, "window", None)
        short = round_up(sequences * window + ubatch, 256) if windows and window else tokens
        cells.append(min(tokens, short) if layer.kept(1) else 0)
    return cells


def _line(engine, arch, tokens, k, v, k_bytes, v_bytes, state, block, cells) -> str:
    """The line as the engine words it."""
    total = k_bytes + v_bytes
    latent = "latent" in arch.kinds
    if engine == "vllm":
        return (
            f"GPU KV cache size: {tokens:,} tokens ({total / GIB:.2f} GiB, {-(-tokens // block):,} blocks of {block})"
        )
    if engine == "sglang":
        if latent:
            return f"KV Cache is allocated. #tokens: {tokens}, KV size: {total / GIB:.2f} GB"
        return (
            f"KV Cache is allocated. #tokens: {tokens}, K size: {k_bytes / GIB:.2f} GB, V size: {v_bytes / GIB:.2f} GB"
        )
    if engine == "tensorrt-llm":
        return f"[MemUsageChange] Allocated {total / GIB:.2f} GiB for max tokens in paged KV cache ({tokens})."
    if engine == "lmdeploy":
        size = total // max(1, tokens) * block >> 20
        return f"[BlockManager] block_size = {size} MB, max_block_count = {-(-tokens // block)}"
    if engine == "transformers":
        return f"{-(-tokens // block)} blocks of {block} tokens, {total / GIB:.2f} GiB"
    names = {"fp32": "f32", "fp16": "f16"}
    kn, vn = names.get(k.name, k.name), names.get(v.name, v.name)
    if engine == "ik_llama.cpp":
        parts = f"K ({kn}): {k_bytes / MIB:8.2f} MiB" + (f", V ({vn}): {v_bytes / MIB:8.2f} MiB" if v_bytes else "")
        return f"llama_init_from_model: KV self size  = {total / MIB:8.2f} MiB, {parts}"
    lines = []
    for size in sorted(set(cells) - {0}, reverse=True):
        chosen = [layer for layer, n in zip(arch.layers, cells) if n == size]
        kb = size * sum(layer.token_bytes(k, _NOTHING) for layer in chosen)
        vb = size * sum(layer.token_bytes(_NOTHING, v) for layer in chosen)
        lines.append(
            f"llama_kv_cache: size = {(kb + vb) / MIB:8.2f} MiB ({size:6d} cells, {len(chosen):3d} layers,  1/1 seqs), "
            f"K ({kn}): {kb / MIB:8.2f} MiB, V ({vn}): {vb / MIB:8.2f} MiB"
        )
    if state:
        lines.append(f"llama_memory_recurrent: size = {state / MIB:8.2f} MiB")
    return "\n".join(lines)


def required_bytes(model, max_model_len: int, kv_dtype="fp16", tensor_parallel=1) -> int:
    """vLLM's "... GiB KV cache is needed" to serve one sequence of max_model_len tokens."""
    model, said = split_label(model)
    found = estimate(model, 1, max_model_len, kv_dtype, tensor_parallel, **said)
    return found.kv_cache_bytes + found.state_bytes
