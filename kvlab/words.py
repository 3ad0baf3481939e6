"""Words for messages."""

from __future__ import annotations


def kind_of(x) -> str:
    """The type of x with its article: "an int", "a Tensor"."""
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
