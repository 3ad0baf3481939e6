"""The notebooks of the lab, those that exist and those to come, and where they lie."""

from __future__ import annotations

from pathlib import Path

COURSE = {
    "00_start_here": ("Start here", "the same text streaming with and without a cache"),
    "01_why_cache": ("Why a cache", "old keys never change; three powers of the length become two"),
    "02_memory_formula": ("The memory formula", "memory against length and batch, with the card's limit drawn in"),
    "03_watch_memory": ("Watch the memory", "the staircase and the saw-tooth of allocation"),
    "04_sliding_window": ("Sliding windows and sinks", "perplexity and recall against the window"),
    "05_quantized_cache": ("The quantized cache", "memory against perplexity"),
    "06_fewer_keys_and_values": ("Fewer keys and values", "what can be left out, and what it costs"),
    "07_paged_cache": ("The paged cache", "a pool of blocks over time, coloured by request"),
    "08_beyond_the_cache": ("Beyond the cache", "flat lines beside the rising one"),
    "09_to_production": ("To production", "an engine's log line, predicted before it is printed"),
}


def course_map(folder: str | Path = ".") -> str:
    """The notebooks as a Markdown table; those that lie in `folder` are linked. Lines: number, title, picture."""
    rows = ["| | notebook | the picture to remember |", "|---|---|---|"]
    for name, (title, picture) in COURSE.items():
        there = (Path(folder) / f"{name}.ipynb").exists()
        rows.append(f"| {name[:2]} | {f'[{title}]({name}.ipynb)' if there else title} | {picture} |")
    return "\n".join(rows)
