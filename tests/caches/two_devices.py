"""An OffloadedCache on one device that moves as if it had two, and counts every byte that crosses."""

from __future__ import annotations

from kvlab.caches import OffloadedCache


class TwoDevices(OffloadedCache):
    """The home is taken for another device than the one that computes, though both are the CPU.

    What crosses is really copied: attention sees tensors of the compute side alone. ahead: as with CUDA, the next layer
    is brought early.
    """

    def __init__(self, *args, ahead: bool = True, **options):
        super().__init__(*args, **options)
        self.ahead, self.crossed = ahead, {"over": 0, "home": 0}

    def _away(self, device) -> bool:
        return True

    def _ahead(self, device) -> bool:
        return self.ahead

    def _copy(self, to, what, wait=False):
        homes = {x.untyped_storage().data_ptr() for held in (self.k, self.v) for x in held.values()}
        way = "over" if what.untyped_storage().data_ptr() in homes else "home"
        self.crossed[way] += what.nbytes
        super()._copy(to, what, wait)
