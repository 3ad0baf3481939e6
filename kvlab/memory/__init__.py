"""The memory calculator: pure Python, no torch, quick to import: most names load on first use (PEP 562).

The functions architecture() and estimate() share a name with their file, so they are bound here, after it is loaded.
"""

from importlib import import_module

from .architecture import architecture
from .estimate import estimate

_HOME = {
    "Architecture": "architecture",
    "model_config": "architecture",
    "ConfigError": "reading",
    "FORMATS": "formats",
    "Format": "formats",
    "kv_formats": "formats",
    "number_format": "formats",
    "Estimate": "estimate",
    "Fit": "capacity",
    "fits": "capacity",
    "kv_tokens": "capacity",
    "max_batch": "capacity",
    "max_seq_len": "capacity",
    "memory_bytes": "capacity",
    "Advice": "advice",
    "Step": "advice",
    "advise": "advice",
    "find_gpu": "catalog",
    "find_model": "catalog",
    "gpus": "catalog",
    "models": "catalog",
    "Prediction": "engines",
    "predict": "engines",
    "explain": "logs",
    "parse_log": "logs",
}
__all__ = ["architecture", "estimate", *_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'kvlab.memory' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
