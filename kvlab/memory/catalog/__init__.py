"""The catalog: models and cards by name, case and punctuation ignored, with suggestions for a name that is not there.

models.json: a configuration for each model, what it comes to, and how sure it is ("file": read in the public source
named; "class": a default of transformers' configuration class; "log": an engine's log line reproduces it; "unchecked").
gpus.json: memory as the driver reports it, which is less than the label on the box ("driver": seen in its output).
Loads no torch.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path

from ..reading import ConfigError

_HERE = Path(__file__).parent
# parts of a name that do not change the shape of the model
_VARIANTS = (
    "hf", "instruct", "chat", "it", "base", "gptq", "awq", "int4", "int8", "fp8", "gguf", "qat", "bnb", "4bit", "8bit",
    "bf16", "fp16", "w4a16", "w8a8", "thinking", "ggml", "ggjt", "2507",
)  # fmt: skip


@cache
def models() -> list[dict]:
    """All entries of models.json."""
    return json.loads((_HERE / "models.json").read_text(encoding="utf-8"))


@cache
def gpus() -> list[dict]:
    """All entries of gpus.json."""
    return json.loads((_HERE / "gpus.json").read_text(encoding="utf-8"))


def find_model(name: str) -> dict | None:
    """The entry of this name or alias; None for what looks like a path. ConfigError with suggestions otherwise.

    "meta-llama/Llama-2-7b-chat-hf", "llama-2-7b" and "LLaMA_2 7B" are one model: chat and quantized variants have the
    shape of their base.
    """
    if not name.strip():
        raise ConfigError("the model's name is empty")
    if entry := _lookup(name, _model_names()):
        return entry
    if _is_path(name):
        return None
    raise ConfigError(
        f"no model named {name!r} in the catalog{_suggest(name, _model_names())}; a config.json works too"
    )


def find_gpu(name: str) -> dict:
    """The card of this name or alias; ConfigError with suggestions for any other."""
    if entry := _lookup(name, _gpu_names()):
        return entry
    raise ConfigError(f"no card named {name!r}{_suggest(name, _gpu_names())}; or state its memory in GiB")


def hub_id(name: str) -> str | None:
    """The name itself when it looks like an id of the Hugging Face hub (owner/model) and is no path on disk."""
    return name if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() else None


def _is_path(name: str) -> bool:
    return name.endswith(".json") or Path(name).exists() or name.startswith((".", "/", "~"))


@cache
def _model_names() -> dict[str, dict]:
    return _index(models())


@cache
def _gpu_names() -> dict[str, dict]:
    return _index(gpus())


def _index(entries: list[dict]) -> dict[str, dict]:
    names: dict[str, dict] = {}
    for entry in entries:
        for name in (entry["name"], *entry["aliases"]):
            names.setdefault(_key(name), entry)
    for entry in entries:  # what an entry is called without Base or Instruct, where no other is called so
        names.setdefault(_key(_without_variants(entry["name"])), entry)
    return names


def _lookup(name: str, names: dict[str, dict]) -> dict | None:
    key = _key(name)
    return names.get(key) or names.get(_key(_without_variants(name)))


def _key(name: str) -> str:
    """Lower case, without owner, brackets, vendor and punctuation."""
    name = re.sub(r"\([^)]*\)", "", name.lower()).rsplit("/", 1)[-1]
    name = re.sub(r"\b(nvidia|geforce|tesla|meta)\b", "", name)
    return re.sub(r"[^a-z0-9.]", "", name) or name


def _without_variants(name: str) -> str:
    first, *rest = re.split(r"[-_ ]", re.sub(r"\([^)]*\)", "", name).rsplit("/", 1)[-1].strip())
    return "-".join([first, *(part for part in rest if part.lower() not in _VARIANTS)])


def _suggest(name: str, names: dict[str, dict]) -> str:
    close = difflib.get_close_matches(_key(name), names, n=3, cutoff=0.6)
    found = list(dict.fromkeys(names[c]["name"] for c in close))
    return f"; did you mean {' or '.join(found)}?" if found else ""
