"""FLOPs counted as they happen, split into the two terms of a Transformer's cost.

    projections   weights x activations: grows with the tokens fed, L for a cached generation and L^2 without a cache
    attention     activations x activations: q k^T and the weighted sum of v, dense T x S, masked pairs included,
                  2 B H T S D + 2 B H T S Dv; grows with L^2 for a cached generation and L^3 without

Why not torch.utils.flop_counter.FlopCounterMode as it is? It has no rule for the attention kernel that a CPU runs, so
there it reports zero for scaled_dot_product_attention; it has none for matrix x vector; and it has one total for both
terms. We keep its registry of formulas, add what it lacks, and sort each product by its operands.

A multiplication and an addition count as two. Elementwise work (norms, softmax, RoPE) is not counted, as in every
published FLOP count. Work inside torch.compile is not seen.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch
from torch.utils.flop_counter import flop_registry

from .watch import Watch, storage_of, tensors_in

aten = torch.ops.aten


def _sdpa(q, k, v):
    # q (B, H, T, D), k (B, H_kv, S, D), v (B, H_kv, S, Dv). A kernel may skip masked pairs; we count all T x S of them.
    # A query group folded into the rows (H_kv heads, G T rows) gives the same number as H = G H_kv heads of T rows.
    pairs = q.shape[:-1].numel() * k.shape[-2]
    return 2 * pairs * q.shape[-1] + 2 * pairs * v.shape[-1]


_LACKING = {
    aten.mv: lambda a, x, **_: 2 * a.numel(),
    aten.addmv: lambda bias, a, x, **_: 2 * a.numel(),
    aten.dot: lambda a, b, **_: 2 * a.numel(),
    aten.vdot: lambda a, b, **_: 2 * a.numel(),
}


class FlopCount:
    """What `count_flops()` yields: `projections`, `attention`, `total`, and `by_op`, {operation name: FLOPs}."""

    def __init__(self, modules=()):
        self.projections = self.attention = 0
        self.by_op: dict[str, int] = {}
        self._weights: dict[int, weakref.ref] = {}  # address of the StorageImpl -> weak reference
        for tensor in tensors_in(modules):
            self._mark(tensor)

    @property
    def total(self) -> int:
        return self.projections + self.attention

    def __repr__(self):
        return f"FlopCount(projections={self.projections:,}, attention={self.attention:,})"

    def _run(self, func, args, kwargs):
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        name = packet.__name__
        weights = [self._is_weight(tensor) for tensor in tensors_in((args, kwargs))]
        if weights and all(weights):
            for tensor in tensors_in(out):
                self._mark(tensor)
        if name.startswith("_scaled_dot_product") and not name.endswith("_backward"):
            self._add(name, _sdpa(*args[:3]), projection=False)
        elif packet in _LACKING or packet in flop_registry:
            rule = _LACKING.get(packet) or flop_registry[packet]
            operands = args[1:3] if name.startswith(("add", "badd")) else args[:2]  # the added term is no operand
            self._add(name, rule(*args, **kwargs, out_val=out), any(self._is_weight(x) for x in operands))
        return out

    def _add(self, name, flops, projection):
        self.by_op[name] = self.by_op.get(name, 0) + flops
        if projection:
            self.projections += flops
        else:
            self.attention += flops

    def _is_weight(self, tensor) -> bool:
        if isinstance(tensor, torch.nn.Parameter):
            self._mark(tensor)
        storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
        return storage is not None and storage._cdata in self._weights

    def _mark(self, tensor):
        if (storage := storage_of(tensor)) is not None and storage._cdata not in self._weights:
            key = storage._cdata  # an address may be given again: forget it when its storage dies
            self._weights[key] = weakref.ref(storage, lambda _ref: self._weights.pop(key, None))


@contextmanager
def count_flops(*modules: torch.nn.Module):
    """Count the FLOPs of a block: `with count_flops() as f: model(ids)`, then f.projections, f.attention, f.by_op.

    A product belongs to `projections` if one operand is a weight: a Parameter, a view of one, or a tensor computed from
    weights alone (a cast, a concatenation, an absorbed product). Every other product, and every fused attention kernel,
    belongs to `attention`. Name a module if its weights are buffers, or were cast or fused before the block.

    Raises TypeError if something other than modules is named.
    """
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise TypeError(
                f"count_flops takes the modules whose weights it should know, not a {type(module).__name__}"
            )
    count = FlopCount(modules)
    with Watch(count._run):
        yield count
