"""The reader of config.json."""

from .runnable import model_config

__all__ = ["model_config"]
