"""Draws figures/: python -m kvlab.gallery [NAME ...]   (or make figures)

PICTURES are PNGs for the README, slides and GitHub; PAGES are pages that need nothing but a browser. All is computed,
not timed, so every machine draws the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .config import ModelConfig
from .plots import figures, memory_page, pool_page
from .plots.explorers import CostExplorer
from .plots.growth import flop_lines
from .plots.memory import MemoryExplorer
from .plots.pool import PoolExplorer
from .plots.ring import RingExplorer

FOLDER = Path(__file__).resolve().parent.parent / "figures"
LENGTHS = [2**p for p in range(4, 18)]


def _flops(term: str, title: str) -> dict:
    """FLOPs of a whole generation against its length, without a cache and with two, on SmolLM2-135M's shape."""
    smollm2 = ModelConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    return {**flop_lines(smollm2, 512, LENGTHS, (LENGTHS[-4], LENGTHS[-1]), term), "title": title}


PICTURES = {
    "cost": lambda: CostExplorer().snapshot().data,
    "memory": lambda: MemoryExplorer().snapshot().data,
    "flops": lambda: _flops("total", "FLOPs to write a text with SmolLM2-135M"),
    "attention": lambda: _flops("attention", "Attention's share of the FLOPs, SmolLM2-135M"),
    "ring": lambda: RingExplorer().snapshot(token=17).data,
    "pool": lambda: PoolExplorer().snapshot().data,
}
PAGES = {"memory_explorer": memory_page.page, "pool_explorer": pool_page.page}


def draw(name: str, folder: Path = FOLDER) -> list[Path]:
    """Writes figures/NAME.png, or NAME.html for a page. Returns the paths."""
    if name not in PICTURES and name not in PAGES:
        raise ValueError(f"no picture {name!r}; there are {', '.join([*PICTURES, *PAGES])}")
    folder.mkdir(exist_ok=True)
    if name in PAGES:
        (folder / f"{name}.html").write_text(PAGES[name](), encoding="utf-8")
        return [folder / f"{name}.html"]
    path = folder / f"{name}.png"
    path.write_bytes(figures.draw(PICTURES[name]()).png())
    return [path]


def main(names: list[str]) -> int:
    try:
        for name in names or [*PICTURES, *PAGES]:
            print(*(path.name for path in draw(name)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
