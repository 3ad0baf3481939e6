"""check_cache(factory): is this a right KV cache, and if not, what is wrong with it, in words.

The judge is the model without a cache: logits must be equal, in float64, where rounding is 1e-15 and any mistake is
1e-3 or more (comparing generated tokens would miss many). Where they differ, hypotheses.py says why.
"""

from __future__ import annotations

import torch

from kvlab.check.cases import Cases
from kvlab.check.runs import Report
from kvlab.check.spy import Found
from kvlab.config import ModelConfig
from kvlab.model import GPT
from kvlab.words import kind_of


def check_cache(factory, model=None, expect="exact") -> Report:
    """Grade a cache: is every logit what the model gives without a cache, whatever is fed in whichever pieces?

    factory: (model, batch_size, max_length) -> any object with append(layer, k, v, pos) -> View. What it has of
             rewind, fork, reorder and nbytes is checked too.
    model:   a GPT in float32 or float64 on the CPU; None: a tiny random one in float64, with 4 query and 2 KV heads.
    expect:  "exact"; "window": it may forget all but the last `window` tokens and the first `sinks`, as its views or
             its attributes of that name say, and must equal the model under that mask (use a small window, up to 512);
             a number: lossy, logits may be off by that much.
    The check stops at the first thing that is wrong. Raises TypeError or ValueError for a wrong argument.
    """
    if not callable(factory):
        raise TypeError(
            f"factory is {kind_of(factory)}; it must be a function (model, batch_size, max_length) -> cache, "
            "for instance lambda model, batch_size, max_length: MyCache(batch_size)"
        )
    number = isinstance(expect, (int, float)) and not isinstance(expect, bool)
    if not (number and expect > 0) and expect not in ("exact", "window"):
        raise ValueError(f"expect={expect!r} must be 'exact', 'window' or a tolerance above 0 for the logits")
    model = tiny_model() if model is None else model
    if not isinstance(model, GPT):
        raise TypeError(f"model is {kind_of(model)}; it must be a kvlab.GPT, or None for a tiny one")
    if model.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the model is {model.dtype}: rounding hides mistakes there; check with model.double()")
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}: check on the CPU, where every run gives the same bits")
    checker = Cases(factory, model, expect)
    try:
        with torch.no_grad():
            checker.everything()
    except Found as found:
        checker.report.messages.append(str(found))
    return checker.report


def tiny_model() -> GPT:
    """Two layers, GQA, float64; weights large enough that attention is far from uniform and every mistake shows."""
    config = ModelConfig(
        vocab_size=499, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    with torch.random.fork_rng(devices=[]):  # the reader's own random numbers stay what they are
        model = GPT(config, seed=1).double()
    for p in model.parameters():
        if p.dim() == 2:
            p.data.mul_(8)
    return model


__all__ = ["Report", "check_cache"]
