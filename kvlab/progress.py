"""A progress bar in text, for terminals and notebooks. Loads no torch."""

from __future__ import annotations

import sys


def bar(total: int, label: str, progress: bool = True):
    """A progress bar in text for terminals and notebooks, silent elsewhere: `with bar(n, "label") as b: b.update()`."""
    from tqdm import tqdm

    out = sys.stderr
    if progress and "ipykernel" in sys.modules and not out.isatty():
        out = _NotebookLine()
    # disable=None: silent where the output is not a terminal, as in a log file
    return tqdm(total=total, desc=label or None, file=out, disable=None if progress else True, leave=False)


class _NotebookLine:
    """A file that shows its last line in one notebook output: plain text, no widget, and gone when the bar closes."""

    def __init__(self):
        from IPython.display import display

        self.handle = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str):
        if text.strip("\r\n"):
            self.handle.update({"text/plain": text.strip()}, raw=True)

    def flush(self):
        pass

    def isatty(self):
        return True
