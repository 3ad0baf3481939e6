"""kvlab bench: every cache in one run and one table, beside transformers' caches and the machine's own limit.

All sides generate greedily from the same prompt with the same weights and threads, in turns, and the medians are
compared. A side is timed in two parts: prefill, the pass over the prompt, and decode, one pass for each later token.
The limit is the time to read once what a decode step must read, weights and cached tokens, at the measured bandwidth.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvlab.bench_sides import RIVALS, Cached, Transformers, twin_of
from kvlab.bench_table import notes, table
from kvlab.cli import Parser
from kvlab.config import ModelConfig
from kvlab.measure import SampledSteps, Timing, about, bandwidth, best_dtype, live_tensors_bytes
from kvlab.measure.about import device_for
from kvlab.measure.sweep import free, out_of_memory
from kvlab.measure.timing import clock_on
from kvlab.model import GPT
from kvlab.progress import bar

VARIANTS: dict[str, tuple[str, dict] | None] = {
    "none": None,
    "growing": ("growing", {}),
    "full": ("full", {}),
    "sliding": ("sliding", {"window": 64, "sinks": 4}),
    "int8": ("quantized", {"k_bits": 8, "v_bits": 8}),
    "int4": ("quantized", {"k_bits": 4, "v_bits": 4}),
    "paged": ("paged", {}),
    "shared": ("shared", {"every": 2}),
    "offloaded": ("offloaded", {}),
    "heavy_hitter": ("heavy_hitter", {"budget": 68}),
}
TOY = ModelConfig(vocab_size=4096, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class Row:
    """One side's results. Lists have one entry for each repeat; seconds and bytes.

    prefill:    the pass over the prompt. decode: the new - 1 steps after it, together.
    sampled:    how many of those steps really ran; 0 means all. The others are interpolated between the sampled ones.
    held:       bytes of the cache at the end. read: bytes that a decode step must read, weights and cache, on average.
    same_tokens: how many of the batch * new greedy tokens equal the first exact side's; rounding may part them.
    status:     "ok" or "did not fit".
    """

    name: str
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    sampled: int = 0
    held: int = 0
    read: float = 0.0
    same_tokens: int | None = None
    status: str = "ok"


@dataclass
class Result:
    """One run of the bench: what ran where, and its rows. bandwidth is in bytes/s."""

    about: str
    model: str
    batch: int
    prompt: int
    new: int
    dtype: str
    device: str
    threads: int
    repeats: int
    weights: int
    bandwidth: float
    rows: list[Row]

    def summary(self, row: Row) -> dict:
        """A row's medians: tokens/s over the whole batch, ms/token as one reader waits for them, and its floor."""
        if row.status != "ok":
            return {}
        prefill, decode = Timing(tuple(row.prefill)), Timing(tuple(row.decode))
        steps = self.new - 1
        return {
            "prefill_tokens_per_s": self.batch * self.prompt / prefill.median,
            "prefill_ms_per_token": 1e3 * prefill.median / self.prompt,
            "decode_tokens_per_s": self.batch * steps / decode.median,
            "decode_ms_per_token": 1e3 * decode.median / steps,
            "decode_ms_quartiles": [1e3 * x / steps for x in decode.quartiles],
            "floor_ms_per_token": 1e3 * row.read / self.bandwidth,
        }

    def to_dict(self) -> dict:
        rows = [asdict(row) | self.summary(row) for row in self.rows]
        return asdict(self) | {"rows": rows}


@torch.no_grad()
def run(
    model: GPT | str = "smollm2",
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    batch: int = 1,
    prompt: int = 128,
    new: int = 64,
    dtype: torch.dtype | None = None,
    device=None,
    threads: int | None = None,
    repeats: int = 5,
    against: Sequence[str] = (),
    progress: bool = True,
) -> Result:
    """Measure the variants (and rivals) in turns: one warm-up round, then `repeats` rounds.

    model:    "smollm2", "toy" (random weights), a folder or hub id, or a GPT.
    variants: names of VARIANTS. against: "transformers", its DynamicCache and StaticCache.
    batch, prompt, new: rows, tokens in each prompt, tokens generated for each row (2 or more: prefill gives the first).
    threads:  CPU threads for all sides; None leaves them as they are.

    Raises ValueError for unknown names and senseless sizes, ModuleNotFoundError where transformers is asked for and not
    installed.
    """
    for name, value, least in (("batch", batch, 1), ("prompt", prompt, 1), ("new", new, 2), ("repeats", repeats, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    for asked, known in ((variants, VARIANTS), (against, RIVALS)):
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"{unknown[0]!r} is unknown here; choose from {', '.join(known)}")
    if not variants and not against:
        raise ValueError("variants is empty: name at least one of " + ", ".join(VARIANTS))
    label = model if isinstance(model, str) else "a GPT"
    model = _load(model, dtype, device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return _run(model, label, variants, batch, prompt, new, repeats, against, progress)
    finally:
        torch.set_num_threads(before)


def _run(model, label, variants, batch, prompt, new, repeats, against, progress) -> Result:
    device, length = model.device, prompt + new
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (batch, prompt), generator=rng).to(device)
    sides = {name: Cached(model, *VARIANTS[name], batch, length) if VARIANTS[name] else None for name in variants}
    if against:
        twin = twin_of(model)
        for kind in RIVALS["transformers"]:
            sides[kind] = Transformers(twin, kind, model.config, batch, length)
    fastest = bandwidth(device).bytes_per_second
    rows = {name: Row(name) for name in sides}
    clock, reference, names = clock_on(device), None, list(sides)
    with bar((repeats + 1) * len(names), f"bench {label}", progress) as shown:
        for turn in range(-1, repeats):  # turn -1 warms up, and counts bytes and tokens
            for i in range(len(names)):
                row = rows[names[(turn + i) % len(names)]]
                shown.update()
                if row.status != "ok":
                    continue
                try:
                    times = _uncached if sides[row.name] is None else _cached
                    prefill, decode, tokens = times(row, sides[row.name], model, ids, new, clock)
                except Exception as error:
                    if not out_of_memory(error):
                        raise
                    row.status = "did not fit"
                if row.status != "ok":
                    sides[row.name].cache = None
                    free()
                elif turn >= 0:
                    row.prefill.append(prefill)
                    row.decode.append(decode)
                elif tokens is not None:
                    reference = tokens if reference is None else reference
                    row.same_tokens = int((tokens == reference).sum())
    fastest = max(fastest, bandwidth(device).bytes_per_second)  # a busy moment must not lower the limit
    weights = _weights_read(model)
    for row in rows.values():
        row.read += weights
    return Result(
        about=about(device),
        model=label,
        batch=batch,
        prompt=prompt,
        new=new,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(device),
        threads=torch.get_num_threads(),
        repeats=repeats,
        weights=live_tensors_bytes(model),
        bandwidth=fastest,
        rows=list(rows.values()),
    )


def _cached(row, side, model, ids, new, clock):
    """One generation: seconds of the prefill, seconds of the decode steps, and the tokens (B, new)."""
    side.start()
    tokens = []

    def prefill():
        tokens.append(side.feed(ids).argmax(-1, keepdim=True))

    def decode():
        for _ in range(new - 1):
            tokens.append(side.feed(tokens[-1]).argmax(-1, keepdim=True))

    first = clock(prefill)
    read = side.read()
    rest = clock(decode)
    row.held, row.read = side.held(), (side.read() - read) / (new - 1)
    side.cache = None
    return first, rest, torch.cat(tokens, 1)


def _uncached(row, side, model, ids, new, clock):
    """Every step recomputes its whole text; single steps at three lengths stand for all of them."""
    batch, prompt = ids.shape
    lengths = sorted({prompt + 1, prompt + new // 2, prompt + new - 1})
    text = ids[:, :1].expand(batch, prompt + new)
    step = lambda n: model(text[:, :n], logits_to_keep=1).argmax(-1)  # noqa: E731
    first = clock(lambda: step(prompt))
    steps = SampledSteps(tuple(lengths), tuple(clock(lambda n=n: step(n)) for n in lengths))
    row.sampled = steps.sampled
    return first, steps.total, None


def _load(model, dtype, device) -> GPT:
    if isinstance(model, GPT):
        return model
    device = device_for(device)
    dtype = dtype or best_dtype(device)
    if model == "toy":
        return GPT(TOY).to(device, dtype)
    from kvlab.pretrained import load_pretrained, load_smollm2

    load = load_smollm2 if model == "smollm2" else lambda **where: load_pretrained(model, **where)
    return load(dtype=dtype, device=device)[0]


def _weights_read(model: GPT) -> int:
    """Bytes of weights that a decode step reads: all of them, save an embedding table that is not tied to the head."""
    table = 0 if model.config.tie_word_embeddings else model.embed_tokens.weight.nbytes
    return live_tensors_bytes(list(model.parameters())) - table


def main(argv: Sequence[str] | None = None) -> int:
    """The command `kvlab bench`."""
    parser = Parser("kvlab bench", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, toy (random weights), a folder or a hub id")
    add("--variants", default=",".join(VARIANTS), help="comma-separated, of: %(default)s")
    add("--batch", type=int, default=1)
    add("--prompt", type=int, default=128, help="tokens in each prompt (%(default)s)")
    add("--new", type=int, default=64, help="tokens generated for each row (%(default)s)")
    add("--dtype", choices=DTYPES, help="float32 on a CPU, bfloat16 or float16 on a GPU")
    add("--device", help="cpu, cuda or mps; the best there is")
    add("--threads", type=int, help="CPU threads of all sides")
    add("--repeats", type=int, default=5, help="rounds after the warm-up (%(default)s)")
    add("--against", action="append", default=[], choices=RIVALS, help="also run the same weights there")
    add("--json", metavar="FILE", help="write everything, raw times included; - for stdout, without the table")
    args = parser.parse_args(argv)
    if args.json and args.json != "-":
        Path(args.json).touch()  # a file that cannot be written is better known before the measurement
    result = run(
        args.model,
        [name.strip() for name in args.variants.split(",") if name.strip()],
        batch=args.batch,
        prompt=args.prompt,
        new=args.new,
        dtype=DTYPES.get(args.dtype),
        device=args.device,
        threads=args.threads,
        repeats=args.repeats,
        against=args.against,
    )
    if args.json == "-":
        print(json.dumps(result.to_dict(), indent=1))
        return 0
    from rich.console import Console

    console = Console()
    console.print(table(result))
    for line in notes(result):
        console.print(line, style="dim", soft_wrap=True, highlight=False)
    if args.json:
        Path(args.json).write_text(json.dumps(result.to_dict(), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
