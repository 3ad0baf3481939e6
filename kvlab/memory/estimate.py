"""estimate(): the memory one GPU needs to generate: weights, KV cache, states, and an allowance for the rest.

    KV bytes = batch * tokens kept * layers * (keys + values of one token) * bytes a value

and each factor is taken from the layer it belongs to, so that windows, latents, shared layers, states, K and V in
different formats and tensor parallelism all come out of the same sum. Loads no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from .architecture import Architecture, architecture
from .catalog import find_model
from .formats import kv_formats, weight_format
from .held import held_bytes
from .layers import Layer, round_up
from .params import parameter_count, stored_format
from .reading import ConfigError, check_whole, find, first
from .spellings import FFN, HIDDEN, VOCAB

CUDA_CONTEXT = 512 * 2**20  # a process's CUDA context and libraries: 107 to 555 MiB by card (llama.cpp issue 23604)
PREFILL_TOKENS = 2048  # tokens of prompt that run through the model at once (vLLM's default chunk)
LAYOUTS = ("padded", "reserved", "paged")


@dataclass(frozen=True)
class Estimate:
    """Bytes on each GPU. `total_bytes` is None where the weights are not known.

    kv_cache_bytes: attention keys and values, all layers and sequences. state_bytes: recurrent states, fp32.
    kv_bytes_per_token: what one more token of one sequence adds while no window is full.
    weights_bytes: parameters in weights_dtype, divided among the GPUs. activation_bytes, context_bytes: the allowance.
    held_bytes: all that kvlab's cache of kind `cache` holds, positions, scales and tables included; else None.
    """

    model: str
    batch_size: int
    seq_len: int | tuple[int, ...]
    kv_dtype: str
    weights_dtype: str
    tensor_parallel: int
    kv_cache_bytes: int
    state_bytes: int
    kv_bytes_per_token: int
    weights_bytes: int | None
    activation_bytes: int
    context_bytes: int
    total_bytes: int | None
    held_bytes: int | None
    params: int | None
    layers: tuple[Layer, ...] = field(repr=False)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """For JSON: the same names; `layers` as {kind: how many}."""
        out = {k: v for k, v in asdict(self).items() if k != "layers"}
        kinds = {}
        for layer in self.layers:
            kinds[layer.kind] = kinds.get(layer.kind, 0) + 1
        return {**out, "layers": kinds}


def estimate(
    model_or_config,
    batch_size: int = 1,
    seq_len=1024,
    kv_dtype: str = "fp16",
    tensor_parallel: int = 1,
    *,
    weights_dtype: str | None = None,
    layout: str = "padded",
    block_size: int = 16,
    max_seq_len: int | None = None,
    encoder_len: int | None = None,
    mla: bool = True,
    windows: bool = True,
    cache: str | None = None,
    params: int | None = None,
    **cache_options,
) -> Estimate:
    """The memory that `model_or_config` needs on each of `tensor_parallel` GPUs. Sizes in bytes, lengths in tokens.

    model_or_config: a name in the catalog, a config dict, a config.json or its folder, a ModelConfig.
    seq_len:     tokens of each sequence, prompt and output; or a list with one length a sequence (a ragged batch).
    kv_dtype:    one number format or "K:V", see formats.py.
    weights_dtype: default the configuration's own (its quantization, else its dtype), or fp16.
    layout:      how a batch is stored. "padded": every row as long as the longest; "reserved": every row max_seq_len
                 (or the model's largest position) long; "paged": each row rounded up to blocks of block_size tokens.
    encoder_len: input tokens of an encoder-decoder: its cross-attention cache is fixed by them. mla, windows: False
                 for an engine that unfolds latent attention, or keeps every token of a sliding layer.
    cache:       a kind of kvlab cache: then held_bytes is what it will hold. cache_options: those of make_cache, and
                 max_length; block_size serves both.
    params:      the parameter count, where the configuration does not give it.
    Raises ConfigError for names, formats, sizes or tensor_parallel that cannot be.
    """
    arch, name, known_params = resolve(model_or_config, mla, windows)
    lengths = _lengths(batch_size, seq_len)
    batch_size = lengths.total()
    tp = check_whole("tensor_parallel", tensor_parallel)
    if arch.query_heads and arch.query_heads % tp:
        raise ConfigError(f"tensor_parallel={tp} does not divide the model's {arch.query_heads} attention heads")
    k, v = kv_formats(kv_dtype)
    stored, block = _stored(lengths, layout, block_size, max_seq_len, arch)
    warnings = list(arch.warnings)

    cross = check_whole("encoder_len", encoder_len, 0) if encoder_len is not None else arch.encoder_len
    if cross is None and "cross" in arch.kinds:
        cross = 0
        warnings.append(
            "the cross-attention cache is not counted: it depends on the input alone; state its tokens with encoder_len"
        )
    alike, rows = Counter(arch.layers), Counter(stored)  # most layers and rows are alike: each kind is worked out once
    kv = sum(
        n * m * layer.kv_bytes(cross if layer.kind == "cross" else tokens, k, v, tp, block)
        for layer, n in alike.items()
        for tokens, m in rows.items()
    )
    state = batch_size * sum(n * layer.state_bytes(tp) for layer, n in alike.items())
    per_token = sum(n * layer.kv_bytes(1, k, v, tp) for layer, n in alike.items() if layer.kind != "cross")

    if params is not None:
        check_whole("params", params)
    else:
        params = known_params or parameter_count(arch)
    w = weight_format(weights_dtype or stored_format(arch.config))
    weights = None if params is None else -(-w.row_bytes(params) // tp)
    if weights is None:
        warnings.append("weights unknown: the configuration does not give the parameter count; state it with params")
    activations = _activations(arch, lengths, tp)
    total = None if weights is None else weights + kv + state + activations + CUDA_CONTEXT
    held = None
    if cache is not None:
        if cache == "paged":
            cache_options = {"block_size": block_size, **cache_options}
        held = held_bytes(arch, cache, list(lengths.elements()), k, **cache_options)
    elif cache_options:
        raise ConfigError(f"estimate has no option {next(iter(cache_options))!r}; options of a cache need cache=kind")
    return Estimate(
        model=name,
        batch_size=batch_size,
        seq_len=max(lengths) if len(lengths) == 1 else tuple(seq_len),
        kv_dtype=k.name if k == v else f"{k.name}:{v.name}",
        weights_dtype=w.name,
        tensor_parallel=tp,
        kv_cache_bytes=kv,
        state_bytes=state,
        kv_bytes_per_token=per_token,
        weights_bytes=weights,
        activation_bytes=activations,
        context_bytes=CUDA_CONTEXT,
        total_bytes=total,
        held_bytes=held,
        params=params,
        layers=arch.layers,
        warnings=tuple(warnings),
    )


def resolve(model_or_config, mla: bool = True, windows: bool = True) -> tuple[Architecture, str, int | None]:
    """(architecture, name, parameter count if the catalog knows it) of a catalog name, a configuration or a path."""
    if isinstance(model_or_config, Architecture):
        return model_or_config, model_or_config.family, None
    if isinstance(model_or_config, str):
        entry = find_model(model_or_config)
        if entry is not None:
            return architecture(entry["config"], mla, windows), entry["name"], entry.get("params")
    elif hasattr(model_or_config, "num_hidden_layers") and not hasattr(model_or_config, "to_dict"):
        # kvlab's own ModelConfig: dataclass fields under Hugging Face names
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(model_or_config).items()}
        return architecture({"model_type": "llama", **fields}, mla, windows), "ModelConfig", None
    arch = architecture(model_or_config, mla, windows)
    return arch, str(arch.config.get("_name_or_path") or arch.family or "configuration"), None


def _lengths(batch_size, seq_len) -> Counter:
    """{length: how many sequences have it}."""
    check_whole("batch_size", batch_size)
    if isinstance(seq_len, list | tuple):
        if not seq_len:
            raise ConfigError("seq_len is an empty list; give one length a sequence")
        if batch_size not in (1, len(seq_len)):
            raise ConfigError(f"batch_size={batch_size} contradicts the {len(seq_len)} lengths in seq_len")
        return Counter(check_whole("seq_len", n) for n in seq_len)
    return Counter({check_whole("seq_len", seq_len): batch_size})


def _stored(lengths: Counter, layout, block_size, max_seq_len, arch) -> tuple[Counter, int]:
    """({tokens for which a row has room: how many rows}, tokens a block)."""
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == "paged":
        return lengths, check_whole("block_size", block_size)
    if layout == "padded":
        return Counter({max(lengths): lengths.total()}), 1
    room = arch.max_positions if max_seq_len is None else check_whole("max_seq_len", max_seq_len)
    if room is None:
        raise ConfigError("layout='reserved' needs max_seq_len: the configuration does not state its largest position")
    if room < max(lengths):
        raise ConfigError(f"seq_len={max(lengths)} is longer than the {room} tokens reserved for each sequence")
    return Counter({room: lengths.total()}), 1


def _activations(arch: Architecture, lengths: Counter, tp: int) -> int:
    """An allowance, not a measurement: one layer's widest tensors for a chunk of prompt, and fp32 logits of one step.

    With attention that never builds the tokens x tokens matrix (SDPA, FlashAttention).
    """
    hidden = find(arch.config, *HIDDEN)[1]
    if not isinstance(hidden, int):
        return 0
    ffn = first(arch.config, *FFN, least=0) or 4 * hidden
    vocab = first(arch.config, *VOCAB) or 0
    rows = lengths.total()
    tokens = min(sum(n * times for n, times in lengths.items()), max(PREFILL_TOKENS, rows))
    wide = 4 * hidden + -(-(2 * ffn + 2 * hidden) // tp)
    return 2 * tokens * wide + 4 * rows * round_up(vocab, tp) // tp
