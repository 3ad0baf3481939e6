"""Reading a config.json with care: where it may come from, and keys that must be numbers. Loads no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

_REQUIRED = object()


class ConfigError(ValueError):
    """A configuration that cannot be read, or that contradicts itself; the message names the key and its value."""


def load_config(source) -> dict:
    """The dictionary behind `source`: a dict itself, an object with to_dict() (transformers), a file or a folder.

    Raises ConfigError when there is no such file, or when it is not a JSON object.
    """
    if isinstance(source, dict):
        return source
    if hasattr(source, "to_dict"):
        return source.to_dict()
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a configuration is a dict, a config.json or a folder holding one, not {type(source).__name__}"
        )
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a JSON text file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a JSON {type(config).__name__}, not an object of configuration keys")
    return config


def find(config: dict, *names: str):
    """(name, value) of the first key of `names` that is present and not null, or (None, None).

    Raises ConfigError when two spellings of one key are present and disagree.
    """
    present = [(name, config[name]) for name in names if config.get(name) is not None]
    for name, value in present[1:]:
        if value != present[0][1]:
            raise ConfigError(f"{present[0][0]}={present[0][1]!r} contradicts {name}={value!r}; keep one of them")
    return present[0] if present else (None, None)


def whole(config: dict, *names: str, default=_REQUIRED, least: int = 1) -> int:
    """The whole number under the first present key of `names`; ConfigError when missing, not an int, or too small."""
    name, value = find(config, *names)
    if name is None:
        if default is _REQUIRED:
            raise ConfigError(f"the configuration has no {' or '.join(names)}")
        return default
    return check_whole(name, value, least)


def first(config: dict, *names: str, least: int = 1) -> int | None:
    """The number under the first of `names` that has one; None where none has.

    For what no cache depends on (vocabulary, MLP width, largest position): files state several and mean different
    things by them, so they may disagree; a list, one number a layer, is passed over. ConfigError for any other thing.
    """
    for name in names:
        if config.get(name) is not None and not isinstance(config[name], list):
            return check_whole(name, config[name], least)
    return None


def check_whole(name: str, value, least: int = 1) -> int:
    """`value` itself when it is an int of at least `least`; otherwise ConfigError naming it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be a whole number")
    if value < least:
        raise ConfigError(f"{name}={value} must be at least {least}")
    return value


def flag(config: dict, name: str, default: bool = False) -> bool:
    """The true/false under `name`; ConfigError for anything else."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be true or false")
    return value
