"""Hugging Face checkpoints: a folder with config.json and safetensors, read into a GPT and written from one.

Only safetensors is read: a .bin or .pt file is a pickle, and opening a pickle can run any code. Everything is compared
with the model, name by name and shape by shape, before the first weight is copied.
Format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvlab.config import ModelConfig
from kvlab.memory.architecture import model_config
from kvlab.memory.reading import flag, load_config
from kvlab.model import GPT

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or foreign; the message names the file or tensor and the way out."""


class Stored(NamedTuple):
    """A tensor that is still in its file."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: "F32", "BF16", ...
    load: Callable[[], Tensor]


def read_folder(folder, dtype: torch.dtype, device) -> GPT:
    """The model in `folder`. Raises CheckpointError, or ConfigError for a family that GPT cannot run."""
    folder = Path(folder)
    files = weight_files(folder)
    config = model_config(folder)
    with contextlib.ExitStack() as opened:
        where = {}  # our tensor name -> (open file, its name in the file)
        for path, wanted in files.items():
            file = opened.enter_context(_open(path))
            names = list(file.keys())
            for name in sorted(wanted - set(names)):
                raise CheckpointError(f"{path.name} lacks tensor {name}, which {INDEX} places there")
            for name in names:
                if name.endswith("rotary_emb.inv_freq"):  # older files keep this table; it follows from the config
                    continue
                ours = name.removeprefix("model.")
                if ours in where:
                    raise CheckpointError(f"tensor {name} is in the checkpoint twice, the second time in {path.name}")
                where[ours] = file, name
        model = empty_model(config, dtype, device)
        weights = {ours: _stored(file, name) for ours, (file, name) in where.items()}
        raw = load_config(folder)
        if config.kv_lora_rank is not None and (
            raw["model_type"] != "deepseek_v3" or flag(raw, "rope_interleave", True)
        ):
            weights = {name: _halves_apart(name, stored, config) for name, stored in weights.items()}
        fill(model, weights)
    return model


def weight_files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files of a checkpoint, each with the tensor names that the index, if there is one, puts there."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; a checkpoint is a folder with config.json and model.safetensors")
    if (folder / "model.safetensors").exists():
        return {folder / "model.safetensors": set()}
    if (folder / INDEX).exists():
        try:
            placed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files = {name: {t for t in placed if placed[t] == name} for name in sorted(set(placed.values()))}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{folder / INDEX} is not an index: it must be JSON with a weight_map") from None
        for name in files:
            if os.path.basename(name) != name:
                raise CheckpointError(f"{INDEX} names {name!r}: shards must lie in the folder itself")
            if not (folder / name).exists():
                raise CheckpointError(f"{INDEX} names the shard {name}, which is not in {folder}")
        return {folder / name: wanted for name, wanted in files.items()}
    single = sorted(folder.glob("*.safetensors"))
    if len(single) == 1:
        return {single[0]: set()}
    if single:
        raise CheckpointError(
            f"{folder} holds {len(single)} safetensors files but no {INDEX} that says what belongs together"
        )
    for pickle in (path for pattern in PICKLES for path in sorted(folder.glob(pattern))):
        raise CheckpointError(
            f"{pickle.name} is a pickle, and opening one can run any code, so kvlab reads only safetensors. If you "
            "trust it, convert it once: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise CheckpointError(f"{folder} holds no weights: model.safetensors or {INDEX} with its shards is missing")


def empty_model(config: ModelConfig, dtype: torch.dtype, device) -> GPT:
    """A GPT whose weights are not set yet: no time for random numbers, no second copy in float32 for a moment."""
    with _EmptyOnMeta():
        model = GPT(config)
    model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:  # to_empty made two of it
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


class _EmptyOnMeta(TorchFunctionMode):
    """torch.empty, which makes every parameter, gives shapes without memory; all other tensors are real.

    nn.Embedding's own normal_ is left out: there is nothing to fill, and on shapes alone it would import torch._dynamo.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.nn.init.normal_:
            return kwargs.get("tensor", args[0] if args else None)
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@torch.no_grad()
def fill(model: GPT, weights: dict[str, Stored]) -> None:
    """Copies `weights` into the model's parameters of the same names; their dtype, device and layout stay.

    Checks all names, shapes and types before the first copy.
    """
    params = dict(model.named_parameters())  # a tied lm_head is not listed twice
    tied = model.config.tie_word_embeddings
    for name, param in params.items():
        if name not in weights:
            raise CheckpointError(f"the checkpoint lacks tensor {name} {_shape(param)}")
    for name, stored in weights.items():
        like = params.get("embed_tokens.weight" if tied and name == "lm_head.weight" else name)
        if like is None:
            raise CheckpointError(
                f"the checkpoint has a tensor {name} {_shape(stored)} that its configuration has no place for"
            )
        if tuple(stored.shape) != tuple(like.shape):
            raise CheckpointError(
                f"tensor {name} has shape {_shape(stored)}; the configuration asks for {_shape(like)}"
            )
        if stored.dtype not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(f"tensor {name} is stored as {stored.dtype}; kvlab reads F32, F16, BF16 and F64")
    if tied and "lm_head.weight" in weights:  # some files carry the tied matrix twice
        twins = weights["lm_head.weight"].load(), weights["embed_tokens.weight"].load()
        if not torch.equal(*twins):
            raise CheckpointError("lm_head.weight differs from embed_tokens.weight, but tie_word_embeddings is true")
    for name, param in params.items():
        tensor = weights[name].load()
        if param.dim() == 2 and not param.is_contiguous():  # stored by columns: torch has a fast path for it this way
            param, tensor = param.t(), tensor.t()
        param.copy_(tensor)


def save_pretrained(model: GPT, folder, tokenizer=None) -> Path:
    """Writes config.json and model.safetensors as Hugging Face's libraries write them, and the tokenizer if given.

    The class follows from the configuration: DeepseekV3 with latent attention (V2 where the MLP has biases), Qwen2
    where qkv_bias is set, Mistral where every layer has a window, Llama otherwise. ValueError where none of them can
    express the model. Where layers follow others (kv_owner) only kvlab can read it, and its model_type says so. Returns
    the folder.
    """
    from safetensors.torch import save_file

    config = hf_config(model.config, model.dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, param in model.named_parameters():
        full = name if name.startswith("lm_head") else f"model.{name}"
        order = rope_rows(name, model.config)
        tensors[full] = (param if order is None else param[order.argsort()]).detach().cpu().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save(folder)
    return folder


def hf_config(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict:
    """The config.json of a ModelConfig, for transformers 4 and 5."""
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    latent = config.kv_lora_rank is not None
    if latent and not any(windows):
        version = 2 if config.mlp_bias else 3
        family, name = f"deepseek_v{version}", f"DeepseekV{version}ForCausalLM"
    elif config.qkv_bias and not config.attention_bias and not config.mlp_bias:
        family, name = "qwen2", "Qwen2ForCausalLM"
    elif all(windows) and not latent and not (config.attention_bias or config.qkv_bias or config.mlp_bias):
        family, name = "mistral", "MistralForCausalLM"
    elif not any(windows) and not latent and not config.qkv_bias:
        family, name = "llama", "LlamaForCausalLM"
    else:
        raise ValueError(
            f"no Hugging Face class has sliding windows on {sum(map(bool, windows))} of {len(windows)} layers and "
            + (f"kv_lora_rank={config.kv_lora_rank}, " if latent else "")
            + f"attention_bias={config.attention_bias}, qkv_bias={config.qkv_bias}, mlp_bias={config.mlp_bias}"
        )
    fields = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps rope_theta rope_scaling tie_word_embeddings "
        "bos_token_id eos_token_id pad_token_id"
    )
    out = {"architectures": [name], "model_type": family, "hidden_act": "silu"}
    out |= {field: getattr(config, field) for field in fields.split()}
    out["torch_dtype"] = str(dtype).removeprefix("torch.")
    if latent:
        sizes = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim attention_bias"
        out |= {field: getattr(config, field) for field in sizes.split()}
        out |= {"first_k_dense_replace": config.num_hidden_layers, "rope_interleave": True}  # no layer has experts
        out |= {"mlp_bias": True} if config.mlp_bias else {}
    elif family == "llama":
        out |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    else:
        out["sliding_window"] = config.sliding_window
    if family == "qwen2":
        out |= {"use_sliding_window": any(windows), "layer_types": list(config.layer_types)}
    if config.kv_owner != tuple(range(config.num_hidden_layers)):
        # transformers would open it as its own class and fill the missing projections with random numbers
        out |= {"architectures": ["GPT"], "model_type": f"kvlab_{family}", "kv_owner": list(config.kv_owner)}
    return out


def rope_rows(name: str, config: ModelConfig) -> Tensor | None:
    """The rows of a DeepSeek matrix (or its bias) in kvlab's order; None where they are in that order already.

    DeepSeek turns neighbouring channels (0, 1), (2, 3), ..., kvlab channels i and i + qk_rope_head_dim / 2. With the
    even rows first both turn the same pairs, in queries and keys alike, so that no score changes.
    """
    layer = name.rpartition(".")[0].rpartition(".")[2]
    if config.kv_lora_rank is None or layer not in ("q_proj", "q_b_proj", "kv_a_proj_with_mqa"):
        return None
    rope = torch.arange(config.qk_rope_head_dim).view(-1, 2).t().flatten()  # 0, 2, 4, ..., 1, 3, 5, ...
    heads, before = config.num_attention_heads, config.qk_nope_head_dim
    if layer == "kv_a_proj_with_mqa":
        heads, before = 1, config.kv_lora_rank
    one = torch.cat((torch.arange(before), before + rope))
    return (torch.arange(heads)[:, None] * len(one) + one).flatten()


def _halves_apart(name: str, stored: Stored, config: ModelConfig) -> Stored:
    order = rope_rows(name, config)
    return stored if order is None else stored._replace(load=lambda: stored.load()[order])


def _stored(file, name: str) -> Stored:
    header = file.get_slice(name)
    return Stored(tuple(header.get_shape()), header.get_dtype(), lambda: file.get_tensor(name))


def _open(path: Path):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError("reading a checkpoint needs the safetensors package: pip install safetensors") from None
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path.name} is damaged or not a safetensors file ({error}); it may be cut short: download it again"
        ) from None


def _shape(tensor) -> str:
    return str(tuple(tensor.shape))
