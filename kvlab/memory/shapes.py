"""Keys of a configuration that are more than a number: what each must look like. Loads no torch."""

from __future__ import annotations

from .reading import ConfigError


def _int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _list_of(test):
    return lambda value: isinstance(value, list) and all(map(test, value))


def _positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _repeated(value) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], list) and _int(value[1])


def _block(value) -> bool:
    return isinstance(value, dict) and isinstance(value.get("attention"), dict)


_NAMES = ("a list of names", _list_of(lambda x: isinstance(x, str)))
_NUMBERS = ("a list of layer numbers", _list_of(_int))
_PER_LAYER = ("a list with one number of heads a layer", lambda v: isinstance(v, str) or _list_of(_int)(v))
_FACTOR = ("a number above 0", _positive)
_OBJECT = ("an object", lambda v: isinstance(v, dict))
SHAPES = {
    "_block_types": _NAMES, "block_types": _NAMES, "indexer_types": _NAMES,
    "hybrid_layer_ids": _NUMBERS, "full_attn_idxs": _NUMBERS, "attn_layer_indices": _NUMBERS,
    "cross_attention_layers": _NUMBERS,
    "kv_heads_per_layer": _PER_LAYER, "num_key_value_heads_per_layer": _PER_LAYER,
    "expand": _FACTOR, "mamba_expand": _FACTOR, "expansion_ratio": _FACTOR,
    "per_layer_config": _OBJECT, "compress_rates": _OBJECT,
    "local_attention": ("a whole number", _int),
    "attention_types": ("a list such as [[['global', 'local'], 12]]", _list_of(_repeated)),
    "block_configs": ("a list of blocks, each with its attention", _list_of(_block)),
}  # fmt: skip


def check_shapes(config: dict) -> None:
    """ConfigError for the first key that does not have its shape; a null is a key that is not there."""
    for key, (shape, right) in SHAPES.items():
        if config.get(key) is not None and not right(config[key]):
            text = repr(config[key])
            raise ConfigError(f"{key}={text if len(text) < 60 else text[:57] + '...'} must be {shape}")
