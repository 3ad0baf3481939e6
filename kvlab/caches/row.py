"""One sequence of a paged cache: its block table, and the prefixes it shares with others."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlab.caches.pool import BlockPool


@dataclass
class Row:
    """Position p lives in block table[p // block_size], at p % block_size. Each entry holds one reference."""

    pool: BlockPool
    length: int = 0
    table: list[int] = field(default_factory=list)

    def needs(self, after: int) -> int:
        """How many blocks the table lacks to hold `after` tokens."""
        return max(0, -(-after // self.pool.block_size) - len(self.table))

    def shared_tail(self) -> int | None:
        """Index in the table of the partly filled block that the next token goes into, if another row has it too."""
        i = self.length // self.pool.block_size
        return i if self.length % self.pool.block_size and self.pool.ref[self.table[i]] > 1 else None

    def swap(self, i: int, block: int) -> int:
        """Put `block`, whose reference this table takes over, in place of entry i -> the block that was there."""
        old, self.table[i] = self.table[i], block
        self.pool.release(old)
        return old

    def keep(self, blocks: int) -> None:
        """Release all but the first `blocks` blocks, the last one first: so prefixes survive longest in the pool."""
        while len(self.table) > blocks:
            self.pool.release(self.table.pop())

    def copy(self) -> Row:
        """A row with the same blocks: only the table is copied."""
        for block in self.table:
            self.pool.share(block)
        return Row(self.pool, self.length, list(self.table))

    def match_prefix(self, ids: list[int]) -> int:
        """Take over the full blocks in the pool that begin `ids`, at most len(ids) - 1 tokens -> tokens matched.

        One token must be left to compute, or there would be no logits to go on from.
        """
        key, bs = b"", self.pool.block_size
        for start in range(0, (len(ids) - 1) // bs * bs, bs):
            key = self.pool.chain(key, ids[start : start + bs])
            if key not in self.pool.block_of:
                break
            block = self.pool.block_of[key]
            self.pool.share(block)
            self.table.append(block)
            self.length += bs
        return self.length

    def commit(self, ids: list[int]) -> None:
        """Register the full blocks, which hold `ids`, so that other rows can find them."""
        key, bs = b"", self.pool.block_size
        for i in range(self.length // bs):
            key = self.pool.chain(key, ids[i * bs : (i + 1) * bs])
            self.pool.register(self.table[i], key)
