"""kvlab check: grade a cache that stands in a file or module of yours, and say what is wrong with it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from kvlab.check import check_cache
from kvlab.cli import Parser


def main(argv: list[str]) -> int:
    """The command `kvlab check` -> 0 if the cache is right, 1 if not. ValueError for a factory it cannot find."""
    parser = Parser("kvlab check", description=__doc__)
    parser.add_argument(
        "factory",
        help="FILE.py:NAME or MODULE:NAME, a function or class called as NAME(model, batch_size, max_length)",
    )
    parser.add_argument(
        "--expect",
        default="exact",
        help="exact (the default), window (it may forget all but a window and sinks), or how far logits may be off",
    )
    args = parser.parse_args(argv)
    report = check_cache(load_factory(args.factory), expect=_expectation(args.expect))
    print(report)
    return 0 if report.ok else 1


def load_factory(spec: str) -> Callable:
    """The object named by "FILE.py:NAME" or "MODULE:NAME"; its file is run, as by import."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{spec!r} must name a factory as FILE.py:NAME or MODULE:NAME")
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise ValueError(f"there is no file {where}")
        made = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(made)
        made.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    if not callable(found := getattr(module, name, None)):
        raise ValueError(f"{where} has no function or class {name!r}")
    return found


def _expectation(text: str) -> str | float:
    if text in ("exact", "window"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--expect {text!r} must be exact, window or a number") from None
