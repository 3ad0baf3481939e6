"""kvlab serve-sim: the same requests in the same memory, kept padded, packed, reserved, doubling and paged.

No model runs: requests are lengths, and time is counted in model steps. Exit codes: 0; 2 bad input; 3 no way of keeping
them served all requests.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence

from kvlab.cli import Parser
from kvlab.memory import estimate
from kvlab.progress import bar
from kvlab.workloads import COLUMNS, Arrival, read_trace, workload, write_trace

MIB = 2**20
MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000  # of one request, and of the memory: a table has an entry for each
NOT_ALL_SERVED = 3
OWN = ("rate", "burst", "shared_prefix", "seed")  # options that make a workload, where no trace brings one


def main(argv: Sequence[str]) -> int:
    """The command `kvlab serve-sim`. Raises ValueError for bad input, before anything is simulated."""
    args = _parser().parse_args(argv)
    memory, cost = _memory(args.memory_mib), _cost(args.model, args.kv_dtype)
    slots = memory // cost.kv_bytes_per_token
    if slots < 1:
        raise ValueError(
            f"--memory-mib {args.memory_mib:g} holds less than one token of {cost.kv_bytes_per_token:,} bytes"
        )
    if slots > MOST_TOKENS:
        raise ValueError(
            f"--memory-mib {args.memory_mib:g} holds {slots:,} tokens; at most {MOST_TOKENS:,} are simulated"
        )
    arrivals = _arrivals(args)
    if args.write_trace:
        write_trace(args.write_trace, arrivals)
    from kvlab.serving.rivals import check_names, simulate  # loads torch, for which wrong options need not wait

    names = _names(args.rivals, args.block_size)
    check_names(names, slots)
    sharing = any(a.prefix_tokens for a in arrivals)
    found = []
    with bar(len(arrivals) * len(names), "serve-sim", not args.quiet) as shown:
        for name in names:
            shown.set_description(name)
            options = {"max_model_len": args.max_model_len, "max_num_batched_tokens": args.batched_tokens}
            found.append(simulate(name, arrivals, slots, prefix_sharing=sharing, on_finished=shown.update, **options))
    result = {
        "model": cost.model,
        "kv_dtype": cost.kv_dtype,
        "bytes_per_token": cost.kv_bytes_per_token,
        "weights_bytes": cost.weights_bytes,
        "memory_bytes": memory,
        "slots": slots,
        "requests": len(arrivals),
        "prompt_tokens_median": statistics.median(a.prompt_tokens for a in arrivals),
        "output_tokens_median": statistics.median(a.output_tokens for a in arrivals),
        "last_arrival": arrivals[-1].arrival,
        "max_model_len": args.max_model_len,
        "batched_tokens": args.batched_tokens,
        "prefix_sharing": sharing,
        "seed": None if args.trace else args.seed or 0,
        "trace": args.trace,
        "warnings": _warnings(cost),
        "rivals": [f.to_dict() | _read(f, cost) for f in found],
    }
    if args.json:
        print(json.dumps(result, indent=1), flush=True)
    else:
        from kvlab.serve_table import show

        show(result)
    return 0 if any(f.finished == f.requests for f in found) else NOT_ALL_SERVED


def _parser() -> Parser:
    p = Parser("kvlab serve-sim", description=__doc__.split("\n\n")[0])
    add = p.add_argument
    add("--requests", type=int, help="how many (200); with --trace the first so many of it (all)")
    add("--memory-mib", type=float, default=64, help="memory for keys and values (%(default)s)")
    add("--model", default="smollm2-135m", help="whose tokens are kept: a catalog name or a config.json (%(default)s)")
    add("--kv-dtype", default="fp16", help="number format of keys and values, as in kvlab fit (%(default)s)")
    add("--max-model-len", type=int, default=1024, help="longest prompt and output together (%(default)s)")
    add("--rate", type=float, help="Poisson arrivals: requests a model step (all at step 0)")
    add("--burst", type=int, help="so many arrive together (1)")
    add("--shared-prefix", type=int, help="tokens of a system prompt before every prompt, shared in blocks (0)")
    add("--seed", type=int, help="of lengths and arrivals (0)")
    add("--trace", metavar="FILE", help=f".csv with a header or .jsonl; columns: {', '.join(COLUMNS)}; see the README")
    add("--skip-bad-rows", action="store_true", help="leave out a trace's bad rows, each told on stderr")
    add("--write-trace", metavar="FILE", help="write the requests as a trace, .csv or .jsonl")
    add("--rivals", default="padded,packed,reserved,doubling,paged", help="comma-separated, of: %(default)s")
    add("--block-size", default="1,8,16,64,256", help="tokens a block of paged, comma-separated (%(default)s)")
    add("--batched-tokens", type=int, default=256, help="tokens computed in one step at most (%(default)s)")
    add("--quiet", action="store_true", help="no progress bar")
    add("--json", action="store_true", help="all figures as JSON")
    return p


def _memory(mib: float) -> int:
    if not (math.isfinite(mib) and 0 < mib < 2**30):
        raise ValueError(f"--memory-mib {mib} must be more than 0 and less than {2**30}")
    return int(mib * MIB)


def _cost(model: str, kv_dtype: str):
    """The estimate of one sequence of one token: what a token costs, and the weights."""
    cost = estimate(model, 1, 1, kv_dtype)
    if not cost.kv_bytes_per_token:
        raise ValueError(f"{cost.model} keeps no keys and values that grow with the text: there is nothing to page")
    return cost


def _warnings(cost) -> list[str]:
    found = list(cost.warnings)
    if windows := [x for x in cost.layers if getattr(x, "window", None) or getattr(x, "chunk", None)]:
        found.append(f"{len(windows)} layers with a window are counted as if they kept every token")
    if cost.state_bytes:
        found.append(f"the recurrent state, {cost.state_bytes:,} bytes for each request, is not counted")
    return found


def _arrivals(args) -> list[Arrival]:
    if not 2 <= args.max_model_len <= MOST_TOKENS:
        raise ValueError(f"--max-model-len {args.max_model_len} must be between 2 and {MOST_TOKENS:,}")
    if args.batched_tokens < 1:
        raise ValueError(f"--batched-tokens {args.batched_tokens} must be at least 1")
    if args.requests is not None and not 1 <= args.requests <= MOST_REQUESTS:
        raise ValueError(f"--requests {args.requests} must be between 1 and {MOST_REQUESTS:,}")
    if args.trace is None:
        if args.skip_bad_rows:
            raise ValueError("--skip-bad-rows needs a --trace to read")
        own = {name: getattr(args, name) for name in OWN if getattr(args, name) is not None}
        return workload(200 if args.requests is None else args.requests, max_model_len=args.max_model_len, **own)
    for name in OWN:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} makes a workload and --trace brings one: give one of them")
    skip = (lambda text: print(f"kvlab: serve-sim: left out: {text}", file=sys.stderr)) if args.skip_bad_rows else None
    return read_trace(args.trace, max_model_len=args.max_model_len, on_bad=skip)[: args.requests]


def _names(rivals: str, block_sizes: str) -> list[str]:
    names = []
    for name in [part.strip() for part in rivals.split(",") if part.strip()]:
        if name == "paged":
            names += [f"paged-{size.strip()}" for size in block_sizes.split(",")]
        else:
            names.append(name)
    if not names:
        raise ValueError("--rivals is empty: name at least one of padded, packed, reserved, doubling, paged")
    return list(dict.fromkeys(names))


def _read(figures, cost) -> dict:
    """Bytes that all steps must read, where the weights are known."""
    if cost.weights_bytes is None:
        return {"bytes_read": None}
    return {"bytes_read": figures.bytes_read(cost.weights_bytes, cost.kv_bytes_per_token)}
