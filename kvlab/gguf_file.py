"""GGUF, llama.cpp's one-file format: its metadata, and its weights under Hugging Face's names.

The `gguf` package reads the file and undoes the quantization (Q4_1: 32 weights share a scale and a minimum). Two things
are left to do here. llama.cpp renames the tensors, and it reorders the rows of q_proj and k_proj: its RoPE turns
neighbouring channels (0, 1), (2, 3), ..., while Hugging Face's turns channel i with channel i + head_dim / 2.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np

from kvlab.config import ModelConfig

_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """An open GGUF file of a Llama-family model.

    metadata: dict of every key and value in the file ("llama.block_count": 30, "tokenizer.ggml.tokens": [...], ...).
    Raises ValueError for a file that is not GGUF or not of llama.cpp's "llama" architecture.
    """

    def __init__(self, path):
        try:
            from gguf import GGUFReader
        except ImportError:
            raise ImportError("reading a GGUF file needs the gguf package: pip install gguf") from None

        class Reader(GGUFReader):
            # np.memmap is slow to slice, and the reader slices it for each of the 100,000 strings of a vocabulary.
            # The same bytes seen as a plain array take a third of the time.
            data = property(lambda self: self._bytes, lambda self, mapped: setattr(self, "_bytes", np.asarray(mapped)))

        try:
            reader = Reader(path)
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{Path(path).name} is not a whole GGUF file ({error})") from None
        self.metadata = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"{Path(path).name} holds a {architecture!r} model; kvlab reads GGUF files of 'llama' models"
            )

    @property
    def config(self) -> ModelConfig:
        """The ModelConfig that the metadata states."""
        meta = self.metadata
        return ModelConfig(
            vocab_size=len(meta["tokenizer.ggml.tokens"]),
            hidden_size=meta["llama.embedding_length"],
            intermediate_size=meta["llama.feed_forward_length"],
            num_hidden_layers=meta["llama.block_count"],
            num_attention_heads=meta["llama.attention.head_count"],
            num_key_value_heads=meta.get("llama.attention.head_count_kv"),
            head_dim=meta.get("llama.rope.dimension_count"),
            max_position_embeddings=meta["llama.context_length"],
            rms_norm_eps=float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.7g}"),  # stored as float32: 1e-05
            rope_theta=meta.get("llama.rope.freq_base", 10000.0),
            tie_word_embeddings="output.weight" not in self._tensors,
            bos_token_id=meta.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=meta.get("tokenizer.ggml.eos_token_id"),
            pad_token_id=meta.get("tokenizer.ggml.padding_token_id"),
        )

    def weights(self) -> dict:
        """Hugging Face's name without "model." -> (shape (out, in), function that returns the float32 array)."""
        config, out = self.config, {}
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for name, tensor in self._tensors.items():
            layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if layer and layer[2] in _IN_LAYER:
                ours, n_heads = f"layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}", heads.get(layer[2])
            elif name.removesuffix(".weight") in _TOP:
                ours, n_heads = _TOP[name.removesuffix(".weight")] + ".weight", None
            else:
                raise ValueError(f"tensor {name} of the GGUF file belongs to no part of a Llama model")
            shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF names the innermost dimension first
            out[ours] = shape, partial(_load, tensor, n_heads)
        return out


def _load(tensor, n_heads: int | None) -> np.ndarray:
    from gguf.quants import dequantize

    array = dequantize(tensor.data, tensor.tensor_type)
    if n_heads is not None:
        array = unpermute(array, n_heads)
    return array if array.flags.writeable else array.copy()  # float32 tensors are views of the read-only file


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """q or k rows (n_heads * dim, ...) from llama.cpp's order, pairs side by side, to Hugging Face's, halves apart."""
    pairs = rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:])  # (heads, dim/2, 2, in)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
