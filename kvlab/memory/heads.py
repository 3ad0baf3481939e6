"""Heads and their widths: the part of a configuration that calculators get wrong most often. Loads no torch."""

from __future__ import annotations

import re

from .layers import Attention, Cross, Latent, Layer, NoCache
from .reading import ConfigError, check_whole, find, flag, whole
from .spellings import CHUNK, DECODER_HEADS, HEAD_DIM, HIDDEN, KV_HEADS, WINDOW


def attention(config: dict, family: str, i: int, kind: str, mla: bool) -> Layer:
    """The attention of layer `i`, of kind full, sliding, chunked or cross."""
    heads = _count(config, DECODER_HEADS, i)
    local = kind == "sliding"
    window = None
    if local:
        window = config.get("local_attention") // 2 if config.get("local_attention") else whole(config, *WINDOW)
    index = whole(config, "index_head_dim", default=0, least=0)
    roles = config.get("indexer_types")
    if roles and i >= len(roles):
        raise ConfigError(f"indexer_types names {len(roles)} layers; it has nothing for layer {i}")
    if kind != "full" or (roles and roles[i] == "shared") or family.startswith("minimax"):
        index = 0  # only the layer that computes an index keeps it
    if config.get("kv_lora_rank") is not None:
        rank, rope = whole(config, "kv_lora_rank"), whole(config, "qk_rope_head_dim", least=0)
        if mla:
            return Latent(rank, rope, window, index)
        return Attention(heads, whole(config, "qk_nope_head_dim") + rope, whole(config, "v_head_dim"), window)
    kv_heads = _kv_heads(config, family, i, heads, kind)
    if kv_heads == 0:
        return NoCache()
    if heads and heads % kv_heads:
        raise ConfigError(f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    key = "swa_head_dim" if local else "global_head_dim"
    dim = whole(config, key, default=None) if config.get(key) else _head_dim(config, family, heads)
    v_key = "swa_v_head_dim" if local and config.get("swa_v_head_dim") else "v_head_dim"
    v_dim = whole(config, v_key, default=dim)
    chunk = whole(config, *CHUNK) if kind == "chunked" else None
    return (Cross if kind == "cross" else Attention)(kv_heads, dim, v_dim, window, chunk, index)


def _kv_heads(config: dict, family: str, i: int, heads: int | None, kind: str) -> int:
    """KV heads of layer `i`; 0 where a search removed its attention."""
    name, listed = find(config, "kv_heads_per_layer", "num_key_value_heads_per_layer")
    if name is not None:
        return _per_layer(listed, i, name)
    if heads is None:
        whole(config, *DECODER_HEADS)  # says what is missing
    if isinstance(config.get("block_configs"), list):  # Nemotron NAS: group size, or no attention at all
        if i >= len(config["block_configs"]):
            raise ConfigError(f"block_configs has {i} blocks; it has nothing for layer {i}")
        block = config["block_configs"][i]["attention"]
        return (
            0 if block.get("no_op") or block.get("replace_with_linear") else heads // whole(block, "n_heads_in_group")
        )
    if family in ("falcon", "refinedweb", "refinedwebmodel"):
        if flag(config, "multi_query") and not flag(config, "new_decoder_architecture"):
            return 1  # the loaded object also shows num_kv_heads = all heads, which it does not use
        own = find(config, *KV_HEADS)
        return (
            whole(config, own[0])
            if own[0] and flag(config, "new_decoder_architecture", own[0] == "n_head_kv")
            else heads
        )
    if family == "gpt_bigcode":
        return 1 if flag(config, "multi_query", True) else heads
    if config.get("multi_query_attention") is False:
        return heads  # ChatGLM states a group number that then does not count
    if kind == "sliding" and config.get("swa_num_key_value_heads"):
        return whole(config, "swa_num_key_value_heads")
    if kind == "sliding" and family == "mimo_v2_flash":
        return 2 * whole(config, *KV_HEADS)  # where the file does not say, the code doubles them
    if kind == "full" and config.get("num_global_key_value_heads"):
        return whole(config, "num_global_key_value_heads")
    inner = config.get("attn_config") if isinstance(config.get("attn_config"), dict) else {}  # MPT, DBRX
    if inner.get("attn_type") == "multiquery_attention":
        return 1
    if inner.get("kv_n_heads"):
        return check_whole("attn_config.kv_n_heads", inner["kv_n_heads"])
    if config.get("multi_query") is True:
        return 1
    if config.get("n_shared_head") is not None:  # PLaMo: so many query heads share one KV head
        return -(-heads // whole(config, "n_shared_head"))
    name, value = find(config, *KV_HEADS)
    return heads if name is None else _count(config, KV_HEADS, i)


def _count(config: dict, names: tuple[str, ...], i: int) -> int | None:
    """A number of heads that may be one for all layers or a list with one a layer; None where the file has none."""
    name, value = next(((k, config[k]) for k in names if config.get(k) is not None), (None, None))
    if isinstance(value, list):
        return _per_layer(value, i, name)
    if name in DECODER_HEADS[:2]:  # an encoder-decoder's num_attention_heads may be the encoder's
        return whole(config, name)
    return whole(config, *names, default=None)


def _per_layer(value, i: int, name: str) -> int:
    if isinstance(value, str):  # "64 layers with 8, 98 with 0"
        value = [int(heads) for n, heads in re.findall(r"(\d+)(?: layers?)? with (\d+)", value) for _ in range(int(n))]
    if not isinstance(value, list) or i >= len(value):
        raise ConfigError(f"{name} must be a list with one number of heads a layer; it has nothing for layer {i}")
    return check_whole(f"{name}[{i}]", value[i], 0)


def _head_dim(config: dict, family: str, heads: int | None) -> int:
    """head_dim where the file states it; otherwise hidden_size / heads, which must then come out even."""
    if family in ("zamba", "zamba2"):
        return whole(config, "attention_head_dim", default=2 * whole(config, *HIDDEN) // heads)
    skip = ("head_dim",) if family == "mamba2" else ()
    for name in HEAD_DIM:
        if config.get(name) is not None and name not in skip:
            return whole(config, name)
    hidden, heads = whole(config, *HIDDEN), heads or whole(config, *DECODER_HEADS)
    if hidden % heads:
        raise ConfigError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}, so head_dim must be given"
        )
    return hidden // heads
