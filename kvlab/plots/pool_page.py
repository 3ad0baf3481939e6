"""figures/pool_explorer.html: the block pool over time as one page that needs no kernel, no network and no library.

Every step's cells and sentence are made here, by kvlab's scheduler; the page's script only shows them.
"""

from __future__ import annotations

import json
from pathlib import Path

from . import charts, theme
from .pool import BUDGET, CELL, KEPT, LONGEST, PREFIX, SLOTS, cells, recorded, said, spans
from .spans import sides

WIDTH, HEIGHT = 960, 390


def page() -> str:
    """The page as text."""
    text = (Path(__file__).parent / "pool_page.html").read_text(encoding="utf-8")
    parts = {
        "colors": f":root{{--paper:{theme.PAPER};--ink:{theme.INK};--muted:{theme.MUTED}}}",
        "data": json.dumps({kept: run(kept) for kept in KEPT}, separators=(",", ":")).replace("</", "<\\/"),
        "slots": SLOTS, "cell": CELL, "longest": LONGEST, "prefix": PREFIX, "budget": BUDGET,
    }  # fmt: skip
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", str(part))
    return text


def run(kept: str) -> dict:
    """One way of keeping them for the page: its picture, its kinds of cells, and for each step the cells' kinds."""
    trace = recorded(kept)
    over_time = spans(trace, title=f"12 requests, {kept}: done after {trace.step} steps")
    left, right = sides(over_time, WIDTH)
    kinds: dict[tuple[str, str, str], int] = {}  # (text, fill, class)
    frames = []
    for step in range(trace.step):
        frame = []
        for c in cells(trace, step):
            free = c["state"] == "free"
            look = "held" if free or c["full"] else "reserved"
            fill = theme.PAPER if free else theme.slot_fill(look, c["group"])
            frame.append(kinds.setdefault((c["text"], fill, c["state"]), len(kinds)))
        frames.append(frame)
    return {
        "svg": charts.draw(over_time, WIDTH, HEIGHT), "left": left, "right": right, "kinds": list(kinds),
        "frames": frames, "said": [said(trace, step) for step in range(trace.step)],
    }  # fmt: skip
