"""How kvlab serve-sim shows its figures: one table that fits a terminal, and what must be said beside it."""

from __future__ import annotations


def show(result: dict) -> None:
    """Print the result that serve_cli made."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(title(result), style="bold"))
    console.print(table(result))
    for line in notes(result):
        console.print(Text(line, style="dim"))


def title(r: dict) -> str:
    when = "all there at step 0" if not r["last_arrival"] else f"the last arriving at step {r['last_arrival']:,.0f}"
    return (
        f"{r['requests']:,} requests, {when}\n"
        f"median prompt {r['prompt_tokens_median']:g} tokens, output {r['output_tokens_median']:g}; "
        f"together at most {r['max_model_len']:,}\n"
        f"{r['model']} in {r['kv_dtype']}: {r['bytes_per_token']:,} bytes a token\n"
        f"{r['memory_bytes'] / 2**20:,.6g} MiB: {r['slots']:,} slots of one token, {r['slots'] // 16:,} blocks of 16"
    )


def table(r: dict):
    """The rivals as a rich Table that fits 80 columns."""
    from rich import box
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    out.add_column("\nkept as", no_wrap=True)
    for name in columns(r):
        out.add_column(name, justify="right", no_wrap=True)
    for f in r["rivals"]:
        out.add_row(f["name"], *[show(f) for show in columns(r).values()])
    return out


def columns(r: dict) -> dict:
    """{title: figures of a rival -> text}. Where all arrive at once, waiting says no more than the steps do."""
    read = lambda f: "?" if f["bytes_read"] is None else f"{f['bytes_read'] / 1e12:,.3g}"  # noqa: E731
    shown = {
        "model\nsteps": lambda f: f"{f['model_steps']:,}",
        "tokens\na step": lambda f: f"{f['tokens_per_step']:.2f}",
        "at once\n(peak)": lambda f: f"{f['mean_requests']:.1f} ({f['peak_requests']:,})",
        "used\nof held": lambda f: f"{f['utilization']:.1%}",
        "stranded\nof free": lambda f: f"{f['external_fragmentation']:.1%}" if f["stranded_steps"] else "-",
        "preem-\npted": lambda f: f"{f['preemptions']:,}",
        **({"waited\nsteps": lambda f: f"{f['mean_wait']:,.0f}"} if r["last_arrival"] else {"read\nTB": read}),
    }
    if not _all_served(r):
        shown["\nserved"] = lambda f: f"{f['finished']:,}"
    return shown


def _all_served(r: dict) -> bool:
    return all(f["finished"] == f["requests"] for f in r["rivals"])


def notes(r: dict) -> list[str]:
    """What the columns mean, and what was left out."""
    lines = [
        "used of held: utilization, tokens over the slots held for them, over all steps",
        "stranded of free: external fragmentation, free slots outside the largest gap",
        "waited: from arrival to the first new token, on average"
        if r["last_arrival"]
        else "read: weights once a step and the cache, all steps, in 10^12 bytes",
    ]
    for f in r["rivals"]:
        if f["gap_failures"]:
            lines.append(
                f"{f['name']}: {f['gap_failures']:,} of {f['failures']:,} failed allocations had enough slots free, "
                f"but apart; up to {f['most_free_at_failure']:.0%} of the memory"
            )
    if not _all_served(r):
        lines.append("served: the others needed more slots than there are for one request")
    if r["prefix_sharing"]:
        lines.append("paged: full blocks of a shared prompt are kept once, so that more may be used than is held")
    return lines + [f"note: {text}" for text in r["warnings"]]
