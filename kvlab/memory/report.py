"""The tables that `kvlab fit` prints. Loads rich, and no torch."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

GIB = 2**30


def print_estimate(found, advice, gpu: str | None = None) -> None:
    """What the memory is made of; with a card also whether it fits, the limits, and what would help."""
    console = Console(highlight=False)
    lengths = (
        f"{found.seq_len:,}" if isinstance(found.seq_len, int) else f"{min(found.seq_len):,} to {max(found.seq_len):,}"
    )
    plural = "s" if found.batch_size > 1 else ""
    share = f", {found.tensor_parallel} GPUs, bytes on each" if found.tensor_parallel > 1 else ""
    console.print(Text(f"{found.model}: {found.batch_size} sequence{plural} of {lengths} tokens{share}", style="bold"))
    table = Table("", "GiB", "", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    if found.weights_bytes is None:
        table.add_row("weights", "?", "the configuration does not tell: give --params")
    else:
        table.add_row(
            "weights", _gib(found.weights_bytes), f"{found.params / 1e9:,.2f} billion in {found.weights_dtype}"
        )
    kinds = ", ".join(f"{n} {kind}" for kind, n in found.as_dict()["layers"].items())
    per_token = f"{found.kv_bytes_per_token:,} bytes a token in {found.kv_dtype}"
    table.add_row("KV cache", _gib(found.kv_cache_bytes), f"{per_token}; layers: {kinds}")
    if found.state_bytes:
        table.add_row("states", _gib(found.state_bytes), "recurrent layers, the same at any length")
    table.add_row("activations", _gib(found.activation_bytes), "an allowance")
    table.add_row("CUDA context", _gib(found.context_bytes), "an allowance")
    if found.total_bytes is not None:
        table.add_row("total", _gib(found.total_bytes), "", style="bold")
    console.print(table)
    for warning in found.warnings:
        console.print(Text(f"note: {warning}", style="yellow"))
    if advice is not None:
        _print_advice(console, advice, gpu)


def _print_advice(console, advice, gpu) -> None:
    ok = advice.cause == "fits"
    where = f" on {gpu}" if gpu else ""
    console.print()
    verdict = "fits" if ok else "does not fit"
    console.print(Text(f"{verdict}{where} ({_gib(advice.memory_bytes)} GiB)", style="bold green" if ok else "bold red"))
    console.print(advice.diagnosis)
    limits = []
    if advice.max_batch is not None:
        limits.append(f"largest batch {advice.max_batch:,}")
    if advice.max_seq_len is not None:
        limits.append(f"longest sequences {advice.max_seq_len:,} tokens")
    if limits:
        console.print("As asked, the limits are: " + "; ".join(limits) + ".")
    if ok or not advice.steps:
        return
    console.print()
    table = Table("what would help", "saves GiB", "then GiB", "fits", "price, and how", box=None, pad_edge=False)
    for i in (1, 2):
        table.columns[i].justify = "right"
    table.columns[4].overflow = "fold"
    for step in advice.steps:
        mark = Text("yes", style="green") if step.fits else Text("no")
        table.add_row(
            step.name, _gib(step.saves_bytes), _gib(step.total_bytes), mark, Text(f"{step.price}\n{step.how}")
        )
    console.print(table)
    if advice.plan:
        console.print("Try first: " + ", then ".join(advice.plan) + ".")


def print_log(report) -> None:
    """Each figure of a log with its meaning, and what they imply."""
    console = Console(highlight=False)
    console.print(Text(f"A log of {report.engine}", style="bold"))
    table = Table("in the log", "meaning", box=None, pad_edge=False)
    for finding in report.findings:
        table.add_row(Text(finding.text), finding.meaning)
    console.print(table)
    if report.implications:
        console.print()
        console.print(Text("What it implies", style="bold"))
        for sentence in report.implications:
            console.print(Text(f"- {sentence}"))


def _gib(n: int) -> str:
    return f"{n / GIB:,.2f}"
