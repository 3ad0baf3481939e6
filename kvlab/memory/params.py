"""How many parameters a decoder has, from its configuration: embeddings, attention, MLP or experts. Loads no torch.

Norms, biases and position tables are left out (well under 1%). Where a model's layers are not of the usual make
(recurrent ones, an image encoder) the count is None: better no figure than a wrong one.
"""

from __future__ import annotations

from .architecture import Architecture
from .layers import Attention, Latent, NoCache, Shared
from .reading import find, first, whole
from .spellings import FFN, HIDDEN, VOCAB

# families whose MLP is two matrices; all others gate theirs: three
_TWO_MATRICES = {
    "gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "opt", "bloom", "mpt", "falcon", "phi", "codegen",
    "ctrl", "gpt_bigcode", "starcoder2", "persimmon", "nemotron", "biogpt", "openai-gpt", "xglm", "gpt-sw3", "phi-msft",
    "jais",
    "refinedweb", "refinedwebmodel", "codeshell", "arcee", "apertus", "whisper", "bart", "t5", "nanochat", "jais2",
}  # fmt: skip
# families with parts that the usual count does not know
_NOT_COUNTED = {
    "apertus1p5_text", "aria_text", "beam", "bert-generation", "ctrl", "doge", "dots3_note_text", "git", "got_ocr2",
    "gemma4_text", "gemma4_unified_text", "hrm_text", "hunyuan_v1_moe", "jetmoe", "laguna", "lfm2", "llama4_text",
    "longcat_flash", "mimo_v2_flash", "moshi", "phi4_multimodal",
}  # fmt: skip
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def parameter_count(arch: Architecture) -> int | None:
    """Parameters of the language model, or None where the configuration does not say enough."""
    config = arch.config
    if (
        arch.family in _NOT_COUNTED
        or config.get("block_configs")
        or config.get("kv_heads_per_layer")
        or config.get("is_decoder")
    ):
        return None
    kinds = set(arch.kinds)
    if not kinds <= {"full", "sliding", "chunked", "latent", "shared"} or any(
        isinstance(x, NoCache) for x in arch.layers
    ):
        return None
    try:
        hidden, vocab = whole(config, *HIDDEN), first(config, *VOCAB)
        mlp = [_mlp(config, arch.family, hidden, i) for i in range(len(arch.layers))]
        attention = [_attention(config, layer, arch.query_heads, hidden) for layer in arch.layers]
    except (ValueError, TypeError):
        return None
    if vocab is None or None in mlp or None in attention:
        return None
    embeddings = vocab * hidden * (1 if _tied(config, arch.family) else 2)
    return embeddings + sum(mlp) + sum(attention)


def stored_format(config: dict) -> str:
    """The number format that the checkpoint's weights are stored in: its quantization, its dtype, or fp16."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method") or "").lower()
        bits = quantized.get("bits") or quantized.get("w_bit")
        if method in ("fp8", "mxfp4"):
            return method
        if quantized.get("load_in_4bit"):
            return "nf4"
        if bits == 8 or quantized.get("load_in_8bit"):
            return "int8"
        if bits == 4 or method in ("awq", "gptq"):
            return "int4"
    return str(config.get("dtype") or config.get("torch_dtype") or "fp16")


def _tied(config: dict, family: str) -> bool:
    tied = config.get("tie_word_embeddings")
    return tied if isinstance(tied, bool) else family.startswith(("gemma", "gpt2", "bloom", "opt", "falcon", "cohere"))


def _attention(config: dict, layer, heads: int | None, hidden: int) -> int | None:
    if isinstance(layer, Shared) and config.get("kv_owner") and not config.get("kv_lora_rank") and heads:
        return 2 * hidden * heads * whole(config, "head_dim")  # q and o alone
    if isinstance(layer, Shared) or heads is None:
        return None
    if isinstance(layer, Latent):
        q = heads * (whole(config, "qk_nope_head_dim") + layer.rope_dim)
        v = whole(config, "v_head_dim")
        q_rank = whole(config, "q_lora_rank", default=0)
        down_up = hidden * q_rank + q_rank * q if q_rank else hidden * q
        unfold = layer.rank * heads * (whole(config, "qk_nope_head_dim") + v)
        return down_up + hidden * (layer.rank + layer.rope_dim) + unfold + heads * v * hidden
    if not isinstance(layer, Attention):
        return None
    q, k, v = heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.kv_heads * layer.v_head_dim
    return hidden * (q + k + v) + heads * layer.v_head_dim * hidden


def _mlp(config: dict, family: str, hidden: int, i: int) -> int | None:
    """One layer's MLP, or all its experts with the shared ones and the router."""
    matrices = 2 if family in _TWO_MATRICES else 3
    dense = first(config, *FFN, least=0)
    if dense is None and (family in _TWO_MATRICES or family in ("gpt2",)):
        dense = (config.get("expansion_ratio") or 4) * hidden
    experts = find(config, *_EXPERTS)[1]
    if not experts or _is_dense(config, i):
        return None if dense is None else matrices * hidden * dense
    width = config.get("moe_intermediate_size") or dense
    if width is None:
        return None
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return 3 * hidden * (experts * width + shared) + hidden * experts


def _is_dense(config: dict, i: int) -> bool:
    """Models with experts keep some layers dense: the first few, or all but every n-th."""
    if i < (config.get("first_k_dense_replace") or 0) or i in (config.get("mlp_only_layers") or []):
        return True
    step = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return (i + 1) % step != 0
