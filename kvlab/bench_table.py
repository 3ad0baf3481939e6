"""How kvlab bench shows its results: one table that fits a terminal, and what must be said beside it."""

from __future__ import annotations

from importlib.metadata import version

from kvlab.bench_sides import RIVALS


def table(result):
    """The results as a rich Table that fits 80 columns."""
    from rich import box
    from rich.table import Table

    r = result
    out = Table(
        title=f"{r.model}: {r.weights / 1e6:,.0f} MB in {r.dtype}, batch {r.batch}, {r.prompt} + {r.new} tokens, "
        f"median of {r.repeats}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    out.add_column("\ncache", no_wrap=True)
    for top, bottom in [
        ("prefill", "tokens/s"),
        ("", "ms/token"),
        ("decode", "tokens/s"),
        ("", "ms/token"),
        ("", "spread"),
        ("held", "MB"),
        ("limit", "ms/token"),
    ]:
        out.add_column(f"{top}\n{bottom}", justify="right", no_wrap=True)
    for row in r.rows:
        s = r.summary(row)
        if not s:
            out.add_row(row.name, row.status)
            continue
        (low, high), mark = s["decode_ms_quartiles"], "~" if row.sampled else ""
        out.add_row(
            row.name,
            f"{s['prefill_tokens_per_s']:,.0f}",
            f"{s['prefill_ms_per_token']:.2f}",
            f"{mark}{s['decode_tokens_per_s']:,.1f}",
            f"{mark}{s['decode_ms_per_token']:.1f}",
            f"±{50 * (high - low) / s['decode_ms_per_token']:.0f}%",
            f"{row.held / 1e6:,.2f}",
            f"{s['floor_ms_per_token']:.1f}",
        )
    return out


def notes(result) -> list[str]:
    """What must be said beside the table: the machine, and what the columns mean."""
    r = result
    lines = [
        r.about,
        f"ms/token: what one reader waits. tokens/s: all {r.batch} row(s). spread: half the distance of the quartiles.",
        f"limit: weights and cached tokens, read once at the measured {r.bandwidth / 1e9:.1f} GB/s.",
    ]
    if sampled := max((row.sampled for row in r.rows), default=0):
        lines.append(f"~ without a cache {sampled} of {r.new - 1} steps were run, the others interpolated.")
    if any(row.name == "offloaded" for row in r.rows):
        where = (
            "where the model computes too: nothing is moved or saved" if r.device == "cpu" else "and moved each step"
        )
        lines.append(f"offloaded: keys and values are kept on cpu, {where}.")
    if any(row.name in RIVALS["transformers"] for row in r.rows):
        lines.append(
            f"{' and '.join(RIVALS['transformers'])}: transformers {version('transformers')}, the same weights."
        )
    return lines
