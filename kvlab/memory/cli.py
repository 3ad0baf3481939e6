"""kvlab fit: does this model fit on this card, and if not, what buys how much. Also explains an engine's log.

Exit codes: 0 it fits (or no card was named), 3 it does not, 2 bad usage. Loads no torch; rich only to print.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .reading import ConfigError, check_whole

GIB = 2**30
FITS, BAD_USAGE, DOES_NOT_FIT = 0, 2, 3


class _Parser(argparse.ArgumentParser):
    """Errors as one sentence, raised instead of printed."""

    def error(self, message):
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    p = _Parser(prog="kvlab fit", description=__doc__.split("\n\n")[0])
    p.add_argument("model", nargs="?", help="a name of the catalog, a config.json or its folder, or a hub id")
    p.add_argument("--gpu", help="a card by name, such as t4, a100-80gb or rtx-4090")
    p.add_argument("--memory-gib", type=float, help="or its memory in GiB")
    p.add_argument("--batch", type=int, default=1, help="sequences at once (1)")
    p.add_argument("--seq", default="1024", help="tokens of each, prompt and output (1024); or a list as in 512,2048")
    p.add_argument("--kv-dtype", default="fp16", help="number format of the cache, or K:V as in q8_0:q4_0 (fp16)")
    p.add_argument("--weights-dtype", help="number format of the weights: fp16, int8, int4, nf4, q4_k_m, ...")
    p.add_argument("--tp", type=int, default=1, help="GPUs that share each layer (1)")
    p.add_argument("--layout", default="padded", help="how a batch is stored: padded, reserved or paged (padded)")
    p.add_argument("--encoder-len", type=int, help="input tokens of an encoder-decoder")
    p.add_argument("--params", help="parameters, where the configuration does not tell: 7e9 or 7b")
    p.add_argument("--log", metavar="FILE", help="explain an engine's log instead (- reads standard input)")
    p.add_argument("--json", action="store_true", help="the figures as JSON, in bytes")
    return p


def main(argv: list[str]) -> int:
    """Run `kvlab fit` with these arguments; prints, and returns the exit code."""
    try:
        args = _parser().parse_args(argv)
        return _explain(args) if args.log else _fit(args)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    except ConfigError as error:
        print(f"kvlab fit: {error}", file=sys.stderr)
        return BAD_USAGE


def _fit(args) -> int:
    from .advice import advise
    from .estimate import estimate

    if args.model is None:
        raise ConfigError("which model? Give a name, a config.json or a hub id, or --log FILE")
    memory = _memory(args)
    model, seq = _model(args.model), _lengths(args.seq)
    options = {
        "kv_dtype": args.kv_dtype,
        "tensor_parallel": args.tp,
        "weights_dtype": args.weights_dtype,
        "layout": args.layout,
        "encoder_len": args.encoder_len,
        "params": _params(args.params),
    }
    found = estimate(model, args.batch, seq, **options)
    advice = None
    if memory is not None:
        if found.total_bytes is None:
            raise ConfigError(
                f"{found.model}: the parameter count is not known; give it with --params, as in --params 7b"
            )
        advice = advise(model, memory, args.batch, seq, **{k: v for k, v in options.items() if v is not None})
    if args.json:
        print(json.dumps(_as_json(found, advice), indent=2))
    else:
        from .report import print_estimate

        print_estimate(found, advice, args.gpu)
    return FITS if advice is None or advice.cause == "fits" else DOES_NOT_FIT


def _as_json(found, advice) -> dict:
    out = found.as_dict()
    if advice is not None:
        out |= {
            "memory_bytes": advice.memory_bytes,
            "fits": advice.cause == "fits",
            "free_bytes": advice.memory_bytes - found.total_bytes,
            "max_batch": advice.max_batch,
            "max_seq_len": advice.max_seq_len,
            "diagnosis": advice.diagnosis,
            "advice": [vars(step) for step in advice.steps],
            "plan": list(advice.plan),
        }
    return out


def _explain(args) -> int:
    from .logs import explain

    if args.model is not None:
        raise ConfigError(f"--log explains a log by itself; leave out {args.model!r}")
    try:
        text = sys.stdin.read() if args.log == "-" else Path(args.log).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read {args.log}: {error.strerror or error}") from None
    found = explain(text)
    if args.json:
        lines = [{"engine": f.engine, **f.values, "text": f.text, "meaning": f.meaning} for f in found.findings]
        out = {"engine": found.engine, "values": found.values, "lines": lines, "implications": found.implications}
        print(json.dumps(out, indent=2))
    else:
        from .report import print_log

        print_log(found)
    return FITS


def _model(text: str):
    """A catalog name or a path stays as it is; a hub id that the catalog does not know is fetched."""
    from .catalog import find_model, hub_id

    try:
        find_model(text)
        return text
    except ConfigError:
        if hub_id(text) is None:
            raise
    from .hub import fetch_config

    return fetch_config(text)


def _memory(args) -> int | None:
    from .capacity import memory_bytes

    if args.gpu is not None and args.memory_gib is not None:
        raise ConfigError("--gpu and --memory-gib say the same thing; give one of them")
    if args.gpu is not None:
        return memory_bytes(args.gpu)
    if args.memory_gib is None:
        return None
    if not 0 < args.memory_gib < 2**20:
        raise ConfigError(f"--memory-gib {args.memory_gib} must be more than 0 and less than {2**20}")
    return int(args.memory_gib * GIB)


def _lengths(text: str):
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--seq {text!r} must be a number of tokens, or several as in 512,2048") from None
    for n in lengths:
        check_whole("--seq", n)
    return lengths[0] if len(lengths) == 1 else lengths


def _params(text: str | None) -> int | None:
    if text is None:
        return None
    scale = {"b": 10**9, "m": 10**6, "k": 10**3}.get(text[-1:].lower(), 1)
    try:
        count = int(float(text[:-1] if scale > 1 else text) * scale)
    except (ValueError, OverflowError):
        raise ConfigError(f"--params {text!r} must be a number such as 7e9 or 7b") from None
    return check_whole("--params", count)
