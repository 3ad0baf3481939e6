"""The command `kvlab`: fit | bench | check | serve-sim. A command's module loads when called: `fit` needs no torch."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from kvlab import __version__

# command -> module whose main(arguments) runs it, and the line of help
COMMANDS = {
    "fit": ("kvlab.memory.cli", "what fits in a GPU's memory: weights, cache, largest batch, longest context"),
    "bench": ("kvlab.bench", "tokens/s and bytes of every cache, measured on this machine"),
    "check": ("kvlab.check_cli", "grade a cache of your own and say what is wrong with it"),
    "serve-sim": ("kvlab.serve_cli", "many requests in one memory: padded, reserved and paged, in one table"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command -> exit code: 0, 2 for bad input (told in one sentence on stderr), or the command's own."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name, *rest = argv or [""]
    try:
        if name in ("", "-h", "--help"):
            print(_usage(), flush=True)
            return 0 if name else 2
        if name in ("-V", "--version"):
            print(f"kvlab {__version__}", flush=True)
            return 0
        if name not in COMMANDS:
            return _fail(f"{name!r} is no command; the commands are {', '.join(COMMANDS)}")
        return import_module(COMMANDS[name][0]).main(rest) or 0
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough; an OSError too, so first
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would try once more to write what is left
        return 1
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return _fail(f"{name}: {error}")
    except KeyboardInterrupt:
        return 130


class Parser(argparse.ArgumentParser):
    """Raises a wrong option as a ValueError, which main() tells in one sentence, in place of a page of usage."""

    def error(self, message):
        raise ValueError(message)


def _fail(message: str) -> int:
    print(f"kvlab: {message}", file=sys.stderr)
    return 2


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  kvlab {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        ["usage: kvlab COMMAND [options]", "", *lines, "", "kvlab COMMAND --help tells a command's options."]
    )


if __name__ == "__main__":
    sys.exit(main())
