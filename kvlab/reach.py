"""How far a token is heard: change one token of a text and see which later outputs change, layer by layer.

A layer with window W sees W keys, its own included, so it carries a token W - 1 positions on. The next layer starts
from there: n layers reach n (W - 1). Beyond that nothing changes, to the last bit; in float64 rounding hides nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.caches.base import KVCache
from kvlab.config import ModelConfig, check_int
from kvlab.measure.watch import layer_outputs
from kvlab.model import GPT


def reach(layers: int, window: int) -> int:
    """The largest distance, in tokens, at which a token can still change an output: layers * (window - 1)."""
    check_int("layers", layers)
    check_int("window", window)
    return layers * (window - 1)


@torch.no_grad()
def heard(model: GPT, ids: Tensor, at: int, other: int, make=None, chunk: int = 1) -> Tensor:
    """The largest change of each layer's output, and of the logits, when token `at` of ids (1, T) becomes `other`.

    -> float64 (layers + 1, T - at) on the CPU: row i is layer i + 1, the last row the logits; column d is distance d.
    make: () -> a new cache, fed `chunk` tokens at a time (both texts alike); None: no cache, one pass.
    A change of exactly 0 means that the token is not heard there. Raises ValueError for a token that is not in the
    text, or one that replaces itself.
    """
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids must be (1, T), one text, not {tuple(ids.shape)}")
    check_int("chunk", chunk)
    if not 0 <= at < ids.shape[1]:
        raise ValueError(f"at={at} is not in the text: it has {ids.shape[1]} tokens, 0 to {ids.shape[1] - 1}")
    if not 0 <= other < model.config.vocab_size or int(ids[0, at]) == other:
        raise ValueError(f"other={other} must be another token than {int(ids[0, at])} and in the vocabulary")
    changed = ids.clone()
    changed[0, at] = other
    outputs = [_outputs(model, text, make, chunk) for text in (ids, changed)]
    rows = [(b - a).abs().amax(-1)[0, at:] for a, b in zip(*outputs)]
    return torch.stack([row.double().cpu() for row in rows])


def farthest(changes: Tensor) -> list[int]:
    """For each row of heard(): the largest distance with any change, -1 where there is none."""
    return [int(row.nonzero().max()) if bool(row.any()) else -1 for row in changes]


def toy(layers: int, seed: int = 0) -> GPT:
    """A small GPT in float64 whose attention is far from uniform, so that every token it sees leaves a trace."""
    config = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2)  # fmt: skip
    model = GPT(config, seed).double()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(5)
    return model


def _outputs(model: GPT, ids: Tensor, make, chunk: int) -> list[Tensor]:
    """What each layer gives, and the logits: (1, T, C) and (1, T, vocab)."""
    cache: KVCache | None = make() if make is not None else None
    step = ids.shape[1] if cache is None else chunk
    with layer_outputs(model) as layers:
        logits = [model(ids[:, i : i + step], cache) for i in range(0, ids.shape[1], step)]
    return [torch.cat(kept, 1) for kept in (*layers, logits)]
