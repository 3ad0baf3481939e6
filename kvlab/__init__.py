"""kvlab: an interactive lab on the Transformer KV cache.

Names load on first use (PEP 562), so that kvlab.memory and kvlab.config work without torch.
"""

from importlib import import_module

_HOME = {
    "ModelConfig": "config",
    "GPT": "model",
    "make_cache": "caches",
    "KVCache": "caches",
    "View": "attention",
    "generate": "generation",
    "stream": "generation",
    "load_smollm2": "pretrained",
    "load_pretrained": "pretrained",
    "chat": "pretrained",
    "evaluate": "quality",
    "recall": "quality",
    "check_cache": "check",
    "check_answer": "exercises",
    "hint": "exercises",
    "Engine": "serving",
    "Request": "serving",
}
_MODULES = (
    "caches",
    "memory",
    "measure",
    "plots",
    "pretrained",
    "quality",
    "check",
    "exercises",
    "bench",
    "serving",
    "workloads",
    "sharing",
    "budgets",
    "mla",
    "attention",
    "model",
    "config",
)

__version__ = "0.1.0"
__all__ = ["__version__", *_HOME]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(import_module(f"kvlab.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"kvlab.{name}")
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")


def __dir__():
    return sorted([*__all__, *_MODULES])
