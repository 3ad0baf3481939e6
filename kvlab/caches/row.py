"""One sequence of a paged cache: its block table, how it grows, and the prefixes it shares with others."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.caches.pool import BlockPool


class Growth(NamedTuple):
    """What Row.grow did, so that a step that fails can be undone."""

    blocks: int  # added at the end of the table
    copied: tuple[int, int, int] | None  # entry of the table, the block that stood there, bytes copied from it


@dataclass
class Row:
    """Position p lives in block table[p // block_size], at p % block_size. Each entry holds one reference."""

    pool: BlockPool
    length: int = 0
    table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)  # of the blocks, from the first on, that commit() has registered
    stale: bool = False  # the last block may hold numbers behind the row's own tokens

    def needs(self, after: int) -> int:
        """How many blocks the table lacks to hold `after` tokens."""
        return max(0, -(-after // self.pool.block_size) - len(self.table))

    def shared_tail(self) -> int | None:
        """Index in the table of the partly filled block that the next token goes into, if another row has it too."""
        i = self.length // self.pool.block_size
        return i if self.length % self.pool.block_size and self.pool.ref[self.table[i]] > 1 else None

    def cost(self, after: int) -> int:
        """How many free blocks grow(after) takes."""
        return self.needs(after) + (after > self.length and self.shared_tail() is not None)

    def grow(self, after: int) -> Growth:
        """Slots for `after` tokens in all, of which new ones are to be written now. PoolExhausted: nothing changed.

        A shared block that will be written to is copied first (copy on write); its last owner keeps it.
        """
        pool, bs, copied = self.pool, self.pool.block_size, None
        new, i = self.needs(after), self.shared_tail() if after > self.length else None
        fresh = pool.allocate(new + (i is not None))
        if i is not None:
            block, old = fresh.pop(), self.table[i]
            copied = i, old, pool.copy(old, block)
            self.swap(i, block)
        if after > self.length and self.length % bs:  # written to: no longer what it was registered as
            pool.forget(self.table[self.length // bs])
            del self.keys[self.length // bs :]
            if self.stale:
                pool.clear(self.table[self.length // bs :][:1], self.length % bs)
        self.stale = self.stale and after == self.length
        self.table += fresh
        if new and after % bs:
            pool.clear(self.table[-1:])  # the others are filled by this step
        return Growth(new, copied)

    def swap(self, i: int, block: int) -> None:
        """Put `block`, whose reference this table takes over, in place of entry i."""
        old, self.table[i] = self.table[i], block
        self.pool.release(old)

    def keep(self, blocks: int) -> None:
        """Release all but the first `blocks` blocks, the last one first: so prefixes survive longest in the pool."""
        while len(self.table) > blocks:
            self.pool.release(self.table.pop())
        del self.keys[blocks:]

    def copy(self) -> Row:
        """A row with the same blocks: only the table is copied."""
        for block in self.table:
            self.pool.share(block)
        return Row(self.pool, self.length, list(self.table), list(self.keys), self.stale)

    def match_prefix(self, ids: list[int]) -> int:
        """Take over the full blocks in the pool that begin `ids`, at most len(ids) - 1 tokens -> tokens matched.

        One token must be left to compute, or there would be no logits to go on from.
        """
        return self.adopt(*self.pool.find(ids))

    def adopt(self, blocks: list[int], keys: list[bytes]) -> int:
        """Make these full blocks, found in the pool, the beginning of an empty row -> tokens it now has."""
        for block in blocks:
            self.pool.share(block)
        self.table, self.keys, self.length = blocks, keys, len(blocks) * self.pool.block_size
        return self.length

    def commit(self, ids: list[int]) -> None:
        """Register the full blocks, which hold `ids`, so that other rows can find them."""
        bs = self.pool.block_size
        for i in range(len(self.keys), self.length // bs):
            key = self.pool.chain(self.keys[-1] if i else b"", ids[i * bs : (i + 1) * bs])
            self.pool.register(self.table[i], key)
            self.keys.append(key)
