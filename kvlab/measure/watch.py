"""Stand between the model and its operations: what the memory meter and the FLOP counter share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Calls `run(func, args, kwargs)` in place of every basic operation; `run` calls func and returns its result.

    An operation that is made of others (under inference_mode: linear, matmul, attention) is taken apart first, so that
    the same code is seen as the same operations with autograd, under no_grad and under inference_mode.
    """

    def __init__(self, run):
        super().__init__()
        self.run = run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten":
            with self:  # a mode is off while it handles an operation; its parts should come here too
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return self.run(func, args, kwargs)


@contextlib.contextmanager
def layer_outputs(model):
    """A list for each layer of a GPT, to which every forward pass inside adds what the layer gives, (B, T, C)."""
    kept: list[list[torch.Tensor]] = [[] for _ in model.layers]
    hooks = [
        block.register_forward_hook(lambda module, args, out, of=of: of.append(out))
        for block, of in zip(model.layers, kept)
    ]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


def storage_of(tensor: torch.Tensor):
    """The untyped storage, or None: sparse tensors and some subclasses have no storage of their own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(obj):
    """Every tensor reachable from `obj`: containers, modules, and the attributes of plain objects such as a cache."""
    stack, seen = [obj], set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is None or isinstance(item, (str, bytes, int, float, complex, type, torch.dtype, torch.device)):
            continue
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, torch.nn.Module):
                stack += [*item.parameters(), *item.buffers()]
            elif isinstance(item, Mapping):
                stack += item.values()
            elif isinstance(item, Iterable) and hasattr(item, "__len__"):  # lists, tuples, sets, deques: not iterators
                stack += item
            elif not callable(item):
                stack += getattr(item, "__dict__", {}).values()
                stack += [getattr(item, slot, None) for c in type(item).__mro__ for slot in getattr(c, "__slots__", ())]
