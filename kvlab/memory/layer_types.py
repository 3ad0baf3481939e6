"""Which kind each layer of a configuration is, however its family spells it. Loads no torch.

Some files list the layers, some give a period, some a string of letters, and some nothing at all: then the family's
own pattern counts, as transformers fills it in.
"""

from __future__ import annotations

from .reading import ConfigError, check_whole, find, flag, whole
from .spellings import CHUNK, LAYER_TYPES, SSM_STATE, WINDOW

# spelling -> the name used here
_NAMES = {
    "full_attention": "full", "attention": "full", "global": "full", "full": "full", "indexed_attention": "full",
    "deepseek_sparse_attention": "full", "minimax_m3_sparse": "full", "qwen_sparse_attention": "full", "hybrid": "both",
    "sliding_attention": "sliding", "local": "sliding", "local_attention": "sliding", "sliding_window": "sliding",
    "chunked_attention": "chunked", "linear_attention": "state", "mamba": "state", "mamba2": "state",
    "recurrent": "state", "conv": "conv", "moe": "none", "mlp": "none", "hybrid_sliding": "both sliding",
    "cross_attention": "cross",
    "heavily_compressed_attention": "compressed", "compressed_sparse_attention": "compressed indexed",
}  # fmt: skip
_LETTERS = {"M": "state", "*": "full", "-": "none", "E": "none", "L": "sliding", "G": "full", "A": "full"}
_ALWAYS_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}


def layer_types(config: dict, n: int, family: str, pattern: dict) -> list[str]:
    """One of full, sliding, chunked, state, conv, both, both sliding, cross, compressed, none for each of `n` layers.

    `pattern` is the family's entry of families.json. Raises ConfigError for a kind of layer that is not known here,
    and for lists that do not have n entries.
    """
    if family in _ALWAYS_RECURRENT:
        return ["state"] * n
    types = _listed(config, n) or _periodic(config, n, family) or _qwen(config, n)
    if types is None and pattern.get("pattern"):
        period = pattern["pattern"]
        types = [_name(period[i % len(period)]) for i in range(n)]
        if pattern.get("last"):
            types[-1] = _name(pattern["last"])
    if types is None or set(types) <= {"full", "sliding"}:
        has_window, has_chunk = find(config, *WINDOW)[1], find(config, *CHUNK)[1]
        window_off = config.get("use_sliding_window") is False
        if types is None:
            name, size = find(config, *SSM_STATE)
            if name and not pattern:
                raise ConfigError(
                    f"{name}={size} sizes recurrent layers, but nothing says which these are: layer_types"
                )
            types = ["sliding" if has_window and not window_off else "chunked" if has_chunk else "full"] * n
        elif not has_window and not config.get("local_attention"):
            types = ["full"] * n  # a pattern of windows without a window
    elif "chunked" in types and not find(config, *CHUNK)[1]:
        types = ["full" if t == "chunked" else t for t in types]
    for i in config.get("cross_attention_layers") or []:
        if check_whole("cross_attention_layers", i, 0) < n:  # Llama 3.2 Vision: these layers look at the image alone
            types[i] = "cross"
    return types


def _listed(config: dict, n: int) -> list[str] | None:
    """The layers one by one, under whichever key."""
    name, listed = find(config, *LAYER_TYPES)
    if name is None and isinstance(config.get("hybrid_override_pattern"), str):
        name, listed = "hybrid_override_pattern", list(config["hybrid_override_pattern"])
        if unknown := set(listed) - set(_LETTERS):
            raise ConfigError(
                f"hybrid_override_pattern has {sorted(unknown)[0]!r}; known letters are {' '.join(_LETTERS)}"
            )
        listed = [_LETTERS[x] for x in listed]
    elif name is None and isinstance(config.get("attention_layers"), list):
        name, listed = "attention_layers", config["attention_layers"]
    elif name is None and isinstance(config.get("attn_type_list"), list):  # MiniMax: 0 is lightning, 1 is softmax
        name, listed = "attn_type_list", ["full" if x else "state" for x in config["attn_type_list"]]
    elif name is None and isinstance(config.get("attention_types"), list):  # GPT-Neo: [[["global", "local"], 12]]
        name = "attention_types"
        listed = [kind for kinds, times in config["attention_types"] for kind in list(kinds) * times]
    elif name is None and isinstance(config.get("linear_attn_config"), dict):  # Kimi Linear counts layers from 1
        full = set(config["linear_attn_config"].get("full_attn_layers") or [])
        name, listed = "linear_attn_config", ["full" if i + 1 in full else "state" for i in range(n)]
    if name is None:
        return None
    if not isinstance(listed, list):
        raise ConfigError(f"{name}={listed!r} must be a list with one entry a layer")
    if len(listed) != n:
        raise ConfigError(f"{name} names {len(listed)} layers, the model has {n}")
    return [_name(x) for x in listed]


def _periodic(config: dict, n: int, family: str) -> list[str] | None:
    """A period or a few numbers that say where the other kind of layer sits."""

    def chosen(layers, kind, rest):
        return [kind if i in set(layers) else rest for i in range(n)]

    blocks = config.get("_block_types") or config.get("block_types")
    if isinstance(blocks, list) and blocks:  # RecurrentGemma: its attention layers are windowed
        names = {"recurrent": "state", "attention": "sliding"}
        return [names.get(blocks[i % len(blocks)]) or _name(blocks[i % len(blocks)]) for i in range(n)]
    if config.get("full_attention_interval") is not None:
        step = whole(config, "full_attention_interval")
        return ["full" if (i + 1) % step == 0 else "state" for i in range(n)]
    if family == "zamba" and config.get("attn_layer_period") is not None:  # its first three layers are fixed
        step, at = whole(config, "attn_layer_period"), whole(config, "attn_layer_offset", default=0, least=0)
        return (["state", "state", "both"] + ["both" if i % step == at else "state" for i in range(n - 3)])[:n]
    if config.get("attn_layer_period") is not None and config.get("hybrid_layer_ids") is None:
        step, first = whole(config, "attn_layer_period"), whole(config, "attn_layer_offset", default=0, least=0)
        return ["full" if i % step == first else "state" for i in range(n)]
    if isinstance(config.get("hybrid_layer_ids"), list):
        return chosen(config["hybrid_layer_ids"], "both", "state")
    if isinstance(config.get("attn_layer_indices"), list):
        return chosen(config["attn_layer_indices"], "full", "state")
    if isinstance(config.get("full_attn_idxs"), list):
        return chosen(config["full_attn_idxs"], "full", "conv")
    if (types := _nope(config, n, family)) is not None:
        return types
    if config.get("sliding_window") is None:
        return None
    step = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if step is None:
        step = config.get("global_attn_every_n_layers")
    if isinstance(step, str):  # EXAONE 4: "LLLG"
        return [_name(_LETTERS.get(step[i % len(step)].upper(), step)) for i in range(n)]
    if step is not None:
        step = check_whole("sliding_window_pattern", step)
        return ["full" if (i + 1) % step == 0 else "sliding" for i in range(n)]
    return None


def _nope(config: dict, n: int, family: str) -> list[str] | None:
    """Layers without rotary positions: Llama 4's look at everything, the others inside a chunk; SmolLM3's slide."""
    rotary, step = config.get("no_rope_layers"), whole(config, "no_rope_layer_interval", default=None)
    if not rotary and step is None:
        return None
    rotary = rotary or [int((i + 1) % step != 0) for i in range(n)]
    if not isinstance(rotary, list) or len(rotary) != n:
        raise ConfigError(f"no_rope_layers must be a list with one 0 or 1 for each of the {n} layers")
    if find(config, *CHUNK)[1]:
        return ["chunked" if x else "full" for x in rotary]
    if family == "smollm3" and flag(config, "use_sliding_window") and config.get("sliding_window"):
        return ["full" if x else "sliding" for x in rotary]
    return None


def _qwen(config: dict, n: int) -> list[str] | None:
    """Qwen2 and its kin state a window and switch it off; switched on, it holds from max_window_layers on."""
    if config.get("use_sliding_window") is None:
        return None
    if not flag(config, "use_sliding_window") or config.get("sliding_window") is None:
        return ["full"] * n
    first = whole(config, "max_window_layers", default=0, least=0)
    return ["sliding" if i >= first else "full" for i in range(n)]


def _name(spelling) -> str:
    if spelling in _NAMES.values():
        return spelling
    if spelling not in _NAMES:
        raise ConfigError(f"layer type {spelling!r} is not known here; known are {', '.join(sorted(_NAMES))}")
    return _NAMES[spelling]
