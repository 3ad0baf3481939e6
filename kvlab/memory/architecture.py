"""The only reader of config.json: any family's configuration -> its layers, each of a kind that knows its bytes.

Three steps: find the language model inside the file, fill what is missing as transformers would, and turn each layer
into what it keeps. The families' spellings are in spellings.py and catalog/families.json. Loads no torch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path

from .heads import attention
from .layer_types import layer_types
from .layers import Attention, Both, Compressed, Cross, Layer, NoCache, Shared, State
from .reading import ConfigError, check_whole, find, first, flag, load_config, whole
from .runnable import model_config, owners_in
from .shapes import check_shapes
from .spellings import (
    CHUNK,
    DECODER_HEADS,
    DECODER_LAYERS,
    ENCODERS,
    FFN,
    HEAD_DIM,
    HIDDEN,
    KNOWN_ELSEWHERE,
    KV_HEADS,
    NESTED,
    POSITIONS,
    VOCAB,
    WINDOW,
)  # fmt: skip
from .states import conv_state, recurrent_state

__all__ = ["Architecture", "architecture", "model_config"]


@dataclass(frozen=True)
class Architecture:
    """What a configuration keeps in memory while it generates.

    layers: one entry a layer, and one Cross entry more for each decoder layer that looks at an encoder.
    query_heads: what tensor parallelism must divide. encoder_len: the input length when the model fixes it (Whisper).
    config: the language model's own keys, missing ones filled in. warnings: what was assumed, in sentences.
    """

    family: str
    layers: tuple[Layer, ...]
    query_heads: int | None
    config: dict
    warnings: tuple[str, ...] = ()
    encoder_len: int | None = None

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers of each kind."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def max_positions(self) -> int | None:
        """The longest text the model is made for, if its configuration says so."""
        return first(self.config, *POSITIONS)


def architecture(source, mla: bool = True, windows: bool = True) -> Architecture:
    """The layers of a configuration: a dict, a transformers config, a config.json or a folder holding one.

    mla=False: latent attention unfolded into full keys and values, as llama.cpp does without -mla.
    windows=False: an engine that keeps every token of a sliding layer.
    Raises ConfigError for missing, contradictory or unknown keys. A family that is not in the table is computed from
    the common keys with a warning.
    """
    if isinstance(source, Architecture):
        return source
    config, nested, cross = _language_model(load_config(source))
    family = config.get("model_type") or ""
    if not isinstance(family, str):
        raise ConfigError(f"model_type={family!r} must be a name, such as 'llama'")
    family = family.lower().removeprefix("kvlab_")  # what kvlab saves of models that only it can run
    check_shapes(config)
    for names in (VOCAB, FFN, POSITIONS):
        first(config, *names, least=0)  # no cache depends on them, yet a wrong one is said now
    if family in _REFUSED:
        raise ConfigError(f"model_type {family!r} is not counted here: {_REFUSED[family]}")
    config, notes, known = _filled(config, family, nested)
    if (known.get("role") == "encoder" or family in ENCODERS) and not config.get("is_decoder"):
        return Architecture(family, (NoCache(),) * whole(config, *DECODER_LAYERS), None, config, tuple(notes))
    n = _layer_count(config, family)
    types = layer_types(config, n, family, known)
    if not windows:
        types = ["full" if t in ("sliding", "chunked") else t for t in types]
    layers = [_layer(config, family, i, types[i], mla) for i in _passes(config, n)]
    _share(config, layers)
    cross = cross or flag(config, "is_encoder_decoder") or config.get("add_cross_attention") is True
    if cross:
        layers += [Cross(x.kv_heads, x.head_dim, x.v_head_dim) for x in layers if isinstance(x, Attention)]
    fixed = whole(config, "max_source_positions", default=None) if family == "whisper" else None
    heads = None if set(types) == {"state"} else _query_heads(config)
    return Architecture(family, tuple(layers), heads, config, tuple(notes), fixed)


_REFUSED = {
    "reformer": "its hashed attention keeps another kind of cache",
    "xlnet": "it keeps a memory of earlier segments, not a KV cache",
    "blt": "it runs three transformers of different lengths",
    "clvp": "it is not one language model",
    "zaya": "its layers mix attention with a state of their own",
}


@cache
def _families() -> dict:
    """families.json: what transformers assumes where a file is silent."""
    return json.loads((Path(__file__).parent / "catalog" / "families.json").read_text(encoding="utf-8"))["families"]


def _language_model(config: dict) -> tuple[dict, bool, bool]:
    """(the keys of the language model, whether they were nested, whether an encoder feeds it)."""
    nested, cross = False, False
    while True:
        inside = next((k for k in NESTED if isinstance(config.get(k), dict) and config[k]), None)
        if inside is None:
            return _mamba_ssm(config), nested, cross
        if inside == "decoder":
            cross = True
            if not any(k in config["decoder"] for k in (*DECODER_LAYERS, "model_type")):
                return config, nested, cross
        keep = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings")
        if not config[inside].get("model_type"):
            keep += ("num_hidden_layers", "hidden_size")
        config = {**{k: config[k] for k in keep if config.get(k) is not None}, **config[inside]}
        nested = True


def _mamba_ssm(config: dict) -> dict:
    """The keys of the mamba_ssm package's own config.json in transformers' words, with that package's defaults."""
    own = config.get("ssm_cfg")
    if config.get("model_type") or not isinstance(own, dict):
        return config
    if config.get("attn_layer_idx"):
        raise ConfigError("attn_layer_idx: the attention that mamba_ssm mixes in is not counted here")
    two = own.get("layer") == "Mamba2"
    out = {**config, "model_type": "mamba2" if two else "mamba", "expand": own.get("expand", 2)}
    out |= {"state_size": own.get("d_state", 128 if two else 16), "conv_kernel": own.get("d_conv", 4)}
    if two:
        head_dim = own.get("headdim", 64)
        heads = out["expand"] * whole(config, *HIDDEN) // head_dim
        out |= {"head_dim": head_dim, "num_heads": heads, "n_groups": own.get("ngroups", 1)}
    return out


def _filled(config: dict, family: str, nested: bool) -> tuple[dict, list[str], dict]:
    """Missing keys from the family's defaults, but never the sizes that make a model: those must be in the file."""
    table = _families()
    known = table.get(family) or table.get(family + "_text") or {}
    notes = []
    if not known and family not in KNOWN_ELSEWHERE | ENCODERS:
        what = f"model_type {family!r} is not known here" if family else "the configuration has no model_type"
        notes.append(f"{what}: computed from the common keys as plain attention; check it against the model's code")
    groups = [DECODER_LAYERS, DECODER_HEADS, HIDDEN, KV_HEADS, HEAD_DIM, WINDOW, CHUNK, POSITIONS]
    essential = () if nested else (DECODER_LAYERS, DECODER_HEADS, HIDDEN)
    filled, assumed = dict(config), []
    for key, value in known.get("defaults", {}).items():
        group = next((g for g in groups if key in g), (key,))
        if key in config or any(k in config for k in group) or group in essential or group is POSITIONS:
            continue  # a class's largest position says nothing about a checkpoint's
        heads = next((config[k] for k in DECODER_HEADS if config.get(k) is not None), None)
        if group is KV_HEADS and isinstance(heads, int) and heads % value and "kv_lora_rank" not in known["defaults"]:
            raise ConfigError(
                f"the file has no {key}, and the {value} of transformers' class do not divide {heads} heads"
            )
        filled[key] = value
        if group in groups[:6] and not (config.get("kv_lora_rank") and group in (KV_HEADS, HEAD_DIM)):
            assumed.append(f"{key}={value}")
    if filled.get("use_sliding_window") is False:
        assumed = [a for a in assumed if not a.startswith(WINDOW)]
    if assumed:
        notes.append(f"not in the file, so taken from transformers' {family} class: {', '.join(assumed)}")
    return filled, notes, known


def _layer_count(config: dict, family: str) -> int:
    if family == "hrm_text" and "num_layers_per_stack" not in config and "H_cycles" in config:
        # every pass through a stack keeps keys and values of its own
        return whole(config, "num_hidden_layers") * config["H_cycles"] * (config["L_cycles"] + 1)
    if family == "longcat_flash" and "num_hidden_layers" not in config:
        return 2 * whole(config, "num_layers")  # two attentions a layer
    for listed in ("layers_block_type", "hybrid_override_pattern"):
        if config.get(listed) and find(config, *DECODER_LAYERS)[0] is None:
            return len(config[listed])
    for name in DECODER_LAYERS[:2]:  # an encoder-decoder: its num_hidden_layers may count the encoder
        if config.get(name) is not None:
            return whole(config, name)
    return whole(config, *DECODER_LAYERS)


def _query_heads(config: dict) -> int | None:
    """What tensor parallelism must divide: the query heads, or what those of all layers have in common."""
    value = next((config[k] for k in DECODER_HEADS if config.get(k) is not None), None)
    if isinstance(value, list):
        return gcd(*(check_whole("num_attention_heads", n, 0) for n in value))
    return whole(config, *DECODER_HEADS[:2], default=None) or whole(config, *DECODER_HEADS, default=None)


def _passes(config: dict, n: int) -> list[int]:
    """The layers in the order they run: models that loop over some of them keep keys and values of every pass."""
    order = list(range(n))
    if config.get("loop_num_passes"):
        first, last = whole(config, "loop_layer_index_start", least=0), whole(config, "loop_layer_index_end")
        return order[:first] + order[first:last] * whole(config, "loop_num_passes") + order[last:]
    if config.get("n_recurrent_loops") and config.get("recurrent_kv_cache_mode", "per_loop") == "per_loop":
        first = whole(config, "n_input_layers", least=0)
        last = first + whole(config, "n_recurrent_layers")
        return order[:first] + order[first:last] * whole(config, "n_recurrent_loops") + order[last:]
    return order


def _layer(config: dict, family: str, i: int, kind: str, mla: bool) -> Layer:
    """Layer `i` of this kind, with the keys that hold for it alone laid over the common ones."""
    own = (config.get("per_layer_config") or {}).get(str(i).zfill(2)) or (config.get("per_layer_config") or {}).get(
        str(i)
    )
    config = {**config, **own} if own else config
    if kind == "none":
        return NoCache()
    if kind == "conv":
        return conv_state(config)
    if kind == "state":
        return recurrent_state(config, family)
    if kind == "both" or kind == "both sliding":
        beside = attention(config, family, i, "sliding" if kind == "both sliding" else "full", mla)
        return Both(beside, _state_beside(config, family, beside))
    if kind.startswith("compressed"):
        rates = config["compress_rates"]
        sparse = kind.endswith("indexed")
        rate = rates["compressed_sparse_attention" if sparse else "heavily_compressed_attention"]
        return Compressed(
            whole(config, *HEAD_DIM), whole(config, *WINDOW), rate, config["index_head_dim"] if sparse else 0
        )
    return attention(config, family, i, kind, mla)


def _state_beside(config: dict, family: str, attention: Attention) -> State:
    """The state that a layer keeps beside its attention."""
    if family.startswith("inkling"):  # short convolutions over keys, values and the layer's two inputs
        conv = whole(config, "conv_kernel_size") - 1
        return State(((attention.kv_heads, 2 * attention.head_dim * conv), (whole(config, *HIDDEN), 2 * conv)))
    return recurrent_state(config, family)


def _share(config: dict, layers: list[Layer]) -> None:
    """Layers that read another layer's keys and values keep nothing themselves."""
    last = whole(config, "num_kv_shared_layers", default=0, least=0)
    if last > len(layers):
        raise ConfigError(f"num_kv_shared_layers={last} is more than the model's {len(layers)} layers")
    for i in range(len(layers) - last, len(layers)):
        layers[i] = Shared()
    for i, owner in enumerate(owners_in(config, len(layers)) or ()):
        if owner != i:
            layers[i] = Shared()
    if config.get("use_cla"):
        group = whole(config, "cla_share_factor", default=2)
        for i in range(len(layers)):
            if i % group:
                layers[i] = Shared()
