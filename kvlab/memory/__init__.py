"""The memory calculator: pure Python, no torch, quick to import; no file is read until it is asked for."""

from __future__ import annotations

from .advice import Advice, Step, advise
from .architecture import Architecture, architecture, model_config
from .capacity import Fit, fits, kv_tokens, max_batch, max_seq_len, memory_bytes
from .catalog import find_gpu, find_model, gpus, models
from .estimate import Estimate, estimate
from .formats import FORMATS, Format, kv_formats, number_format
from .reading import ConfigError

__all__ = [
    "FORMATS",
    "Advice",
    "Architecture",
    "ConfigError",
    "Estimate",
    "Fit",
    "Format",
    "Step",
    "advise",
    "architecture",
    "estimate",
    "find_gpu",
    "find_model",
    "fits",
    "gpus",
    "kv_formats",
    "kv_tokens",
    "max_batch",
    "max_seq_len",
    "memory_bytes",
    "model_config",
    "models",
    "number_format",
]
