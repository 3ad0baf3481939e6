"""Layers that use another layer's keys and values, in a model that was not trained for it."""

from __future__ import annotations

from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import Step, bytes_per_token
from kvlab.caches.full import FullCache
from kvlab.config import check_int, check_owners


class SharedLayersCache(FullCache):
    """A full cache that stores some layers only; each other layer follows one of them and sees its keys and values.

    The follower's own keys and values are computed by the model and thrown away, which a model trained that way would
    not even compute (ModelConfig.kv_owner; CLA, arXiv 2405.12981). Without that training it is lossy, and how much is
    for you to measure: kvlab.sharing says which layers stand it.
    owners: for each layer the layer whose keys and values it uses: itself, or an earlier one that uses its own.
    every:  in place of owners: groups of so many consecutive layers, of which the first is the owner; default 2.
    Queries, and a layer's own window, stay as they are.
    Bytes: as in a full cache, for the owners alone. Read: for every layer, since a follower reads its owner's bytes
    once more. Copied: nothing.
    """

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int = 1024,
        owners: tuple[int, ...] | None = None,
        every: int | None = None,
    ):
        super().__init__(batch_size, max_length)
        if owners is not None and every is not None:
            raise ValueError(f"owners={owners!r} and every={every!r} say the same thing twice: give one of them")
        self.every = 2 if every is None else every
        check_int("every", self.every)
        self.owners = None if owners is None else check_owners(owners, name="owners")
        self._views: dict[int, View] = {}  # owner -> its view in this step

    @classmethod
    def for_model(cls, model, batch_size, max_length, owners=None, **options):
        if owners is not None:
            owners = check_owners(owners, model.config.num_hidden_layers, "owners")
        return cls(batch_size, max_length, owners, **options)

    def owner(self, layer: int) -> int:
        """The layer whose keys and values `layer` uses."""
        if self.owners is None:
            return layer // self.every * self.every
        if layer >= len(self.owners):
            raise ValueError(f"layer {layer} is not in owners={self.owners}: name an owner for every layer")
        return self.owners[layer]

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        owner = self.owner(layer)
        if owner == layer:
            self._views[layer] = super()._write(layer, k, v, step)
            return self._views[layer]
        if owner not in self._views:
            raise ValueError(f"layer {layer} follows layer {owner}, which has stored nothing in this step")
        if (mine := (k.shape[1], k.shape[3], v.shape[3])) != self._shapes[owner]:
            raise ValueError(
                f"layer {layer} has (n_kv, D, D of values) = {mine} and follows layer {owner}, which has "
                f"{self._shapes[owner]}: only layers of one shape can share"
            )
        self.bytes_read += sum(step.after) * bytes_per_token(self.k[owner], self.v[owner])
        return self._views[owner]

    def _finish(self, step: Step) -> None:
        self._views.clear()

    def _undo(self, step: Step) -> None:
        self._views.clear()
