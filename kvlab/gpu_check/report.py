"""The report in three forms: text, results.json, results.png."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from kvlab.gpu_check.setup import Check
from kvlab.plots import theme


def text(about: str, checks: list[Check], speed: list[dict], notes: list[str], seconds: float) -> str:
    lines, part = [f"kvlab GPU check · {about}", ""], None
    order = list(dict.fromkeys(c.part for c in checks))
    for c in sorted(checks, key=lambda c: order.index(c.part)):
        if c.part != part:
            lines += [f"{c.part}"]
            part = c.part
        value = "" if c.value is None else _show(c.value, c.unit)
        limit = "" if c.limit is None else f"limit {_show(c.limit, c.unit)}"
        mark = "ok  " if c.ok else "FAIL"
        lines.append(f"  {mark} {c.name:<36} {value:>14}  {limit:<22} {c.note}".rstrip())
    if speed:
        heads = f"{'tokens/s':>10}{'step':>11}{'prefill':>11}{'cache':>11}{'peak':>11}  attention"
        lines += ["", "speed (peak: bytes above the weights, in prefill and a step)", f"  {'variant':<24}{heads}"]
    for row in speed:
        if row["status"] != "ok":
            lines.append(f"  {row['name']:<24}{row['status']}")
            continue
        used = row["attention"]
        how = f"prefill {used['prefill']['backend']}, decode {used['decode']['backend']}"
        lines.append(
            f"  {row['name']:<24}{theme.digits(row['tokens_per_s']):>10}{theme.seconds(row['step_s']):>11}"
            f"{theme.seconds(row['prefill_s']):>11}{theme.bytes_(row['nbytes']):>11}"
            f"{theme.bytes_(row['peak_bytes']):>11}  {how}"
        )
    failed = [c for c in checks if not c.ok]
    lines += ["", *notes, f"{len(checks) - len(failed)} of {len(checks)} checks passed in {theme.seconds(seconds)}"]
    lines += [f"FAILED: {c.part}: {c.name}" for c in failed]
    return "\n".join(lines)


def _show(value: float, unit: str) -> str:
    return f"{value:.3g}" if unit == "logit" else theme.bytes_(value) if unit == "bytes" else f"{value:,.0f}"


def save(folder: Path, about: str, checks, speed, notes: list[str], seconds: float, versions: dict) -> list[Path]:
    """Write results.json, and results.png where matplotlib is there -> the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "about": about, "versions": versions, "passed": all(c.ok for c in checks), "seconds": round(seconds, 1),
        "notes": notes, "checks": [asdict(c) for c in checks], "speed": speed,
    }  # fmt: skip
    path = folder / "results.json"
    path.write_text(json.dumps(_finite(result), indent=1) + "\n")
    try:
        import matplotlib
    except ImportError:
        print("No picture: matplotlib is not installed.")
        return [path]
    matplotlib.use("Agg", force=False)
    return [path, picture(folder / "results.png", about, checks, speed)]


def _finite(x):
    """JSON has no infinity: None stands for it."""
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [_finite(v) for v in x]
    return None if isinstance(x, float) and not abs(x) < float("inf") else x


def picture(path: Path, about: str, checks: list[Check], speed: list[dict]) -> Path:
    """Three panels: error against its limit, tokens/s, bytes of the cache."""
    from matplotlib.figure import Figure

    with theme.matplotlib_theme():
        rows = [r for r in speed if r["status"] == "ok"]
        parts = [p for p in Counter(c.part for c in checks) if p.startswith("logits")]
        names = list(dict.fromkeys(c.name for c in checks if c.part in parts and c.limit and "control" not in c.name))
        fig = Figure(figsize=(15, 6.2), layout="constrained")
        left, middle, right = fig.subplots(1, 3, width_ratios=(1.35, 1, 1))
        for n, part in enumerate(parts):
            found = {c.name: c for c in checks if c.part == part}
            for y, name in enumerate(names):
                c, shift = found[name], (n - (len(parts) - 1) / 2) * 0.25
                color = theme.GROUPS[n]
                left.plot([max(c.value, 1e-9)], [y + shift], "o", color=color, mec=theme.INK, mew=0.6, ms=6.5, zorder=3)
                left.plot([c.limit], [y + shift], "|", color=theme.INK if c.ok else theme.ALERT, ms=9, mew=1.6)
            left.plot([], [], "o", color=theme.GROUPS[n], mec=theme.INK, mew=0.6, label=part.split(", ")[1])
        left.plot([], [], "|", color=theme.INK, ms=9, mew=1.6, label="limit", linestyle="none")
        left.set(xscale="log", xlabel="largest |difference| of a logit", title="Error and its limit")
        left.set_yticks(range(len(names)), names)
        left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=4, handletextpad=0.3, columnspacing=1.2)
        for ax, key, unit, title in (
            (middle, "tokens_per_s", "", "Decoding, tokens/s"), (right, "nbytes", "B", "Bytes of the cache"),
        ):  # fmt: skip
            values = [r[key] for r in rows]
            bars = ax.barh(range(len(rows)), values, color=[theme.style(r["kind"]).color for r in rows], height=0.7)
            ax.bar_label(
                bars, [theme.number(v, unit) if unit else theme.digits(v) for v in values], padding=4, fontsize=9
            )
            ax.set_yticks(range(len(rows)), [r["name"] for r in rows])
            ax.set_title(title)
            ax.set_xlim(0, 1.28 * max(values, default=1) or 1)
            ax.grid(False)
            ax.tick_params(axis="x", labelbottom=False, length=0)
            ax.spines["bottom"].set_visible(False)
        for ax in (left, middle, right):
            ax.invert_yaxis()
        fig.supxlabel(about, fontsize=9, color=theme.MUTED)
        fig.savefig(path, dpi=110)
    return path
