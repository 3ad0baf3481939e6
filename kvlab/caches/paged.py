"""PagedAttention's cache: each row has a block table, and blocks come from a shared pool as they are needed."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, bytes_per_token, slot_is_position
from kvlab.caches.pool import BlockPool, pool_for
from kvlab.caches.row import Row


class PagedCache(KVCache):
    """Rows take blocks of block_size tokens from a pool, so that at most one block per row is partly empty (vLLM).

    Blocks may be shared: fork() and fork_row() copy tables, not keys, and a shared block is copied when one of its
    owners writes to it (copy on write); match_prefix() takes over full blocks that an earlier row has left behind.
    Rows come and go: add_row(), fork_row(), free_row().
    over(rows) is a cache of rows that somebody else owns, a scheduler for instance.
    A step allocates all it needs before the first layer writes, or raises PoolExhausted with every row as it was.
    Bytes: the pool's keys and values num_blocks*block_size*n_kv*D*itemsize each per layer; tables 8*B*(longest table).
    Copied per layer and step: the gathered blocks, B*(longest table)*block_size*one; and each block copied on write.
    max_length sizes a pool of the cache's own: batch_size rows of that length. pool: take blocks from that one instead.
    """

    owns_rows = True

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int = 1024,
        block_size: int = 16,
        num_blocks: int | None = None,
        pool: BlockPool | None = None,
    ):
        self.rows: list[Row] = []
        super().__init__(batch_size, max_length)
        self.pool = pool = pool_for(pool, num_blocks, block_size, batch_size, max_length)
        self.rows = [Row(pool) for _ in self.rows]
        self.block_size = pool.block_size
        self._table: Tensor | None = None  # the block tables as one tensor (B, longest), made anew when they change

    @classmethod
    def over(cls, rows: list[Row]) -> PagedCache:
        """These rows, of one pool, as a batch: a step writes into them and moves their lengths on. They stay their
        owner's: the cache may be dropped after the step, and their blocks are not released with it."""
        cache = cls(1, pool=rows[0].pool)
        cache.rows, cache.owns_rows = list(rows), False
        return cache

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self.rows = self.rows or [Row(None) for _ in lengths]
        for row, length in zip(self.rows, lengths):
            row.length = length

    # ---- one step

    def _check_room(self, step: Step) -> None:
        new, left = 0, {}  # left: shared block -> owners that have not copied it; the last of them may write in place
        for row, start, after in zip(self.rows, step.start, step.after):
            new += row.needs(after)
            if after > start and (i := row.shared_tail()) is not None:
                block = row.table[i]
                left[block] = left.get(block, self.pool.ref[block]) - 1
                new += left[block] > 0
        self.pool.check_free(new)

    def _begin(self, step: Step) -> None:
        bs, device = self.block_size, step.pos.device
        self._grown = [row.grow(after) for row, after in zip(self.rows, step.after)]
        self.bytes_copied += sum(copied[2] for _, copied in self._grown if copied)
        if self._table is None or any(any(grown) for grown in self._grown) or self._table.device != device:
            self._table = self._table_tensor(device)
        rows, columns = step.real
        pos = step.pos[rows, columns]
        self.at = self._table[rows, pos // bs] * bs + pos % bs  # slot of each new token in the pool
        self.view_pos = slot_is_position(step.after, max(step.after), device)

    def _table_tensor(self, device) -> Tensor:
        """(B, longest); short tables are filled with a block of their own, which position -1 hides."""
        longest = max(len(row.table) for row in self.rows)
        full = [row.table + (row.table[:1] or [0]) * (longest - len(row.table)) for row in self.rows]
        return torch.tensor(full, dtype=torch.int64, device=device)

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        (B, longest), n = self._table.shape, self.view_pos.shape[1]
        parts = []
        for held, x in zip(self.pool.storage(layer, k, v), (k, v)):
            n_kv, _, bs, D = held.shape
            new = x.transpose(1, 2).flatten(0, 1) if step.uniform else x[step.real[0], :, step.real[1]]  # (N, n_kv, D)
            held.view(n_kv, -1, D).index_copy_(1, self.at, new.transpose(0, 1))
            blocks = held.index_select(1, self._table.flatten())  # (n_kv, B*longest, block_size, D)
            parts.append(blocks.view(n_kv, B, longest * bs, D).transpose(0, 1)[:, :, :n])
            self.bytes_copied += blocks.nbytes
        self.bytes_read += sum(step.after) * bytes_per_token(k, v)
        return View(*parts, self.view_pos, all_visible=step.uniform and step.pos.shape[1] == 1)

    def _undo(self, step: Step) -> None:
        for row, (blocks, copied) in zip(self.rows, self._grown):
            row.keep(len(row.table) - blocks)
            if copied:
                self.pool.share(copied[1])
                row.swap(copied[0], copied[1])
        self._table = None

    # ---- rows

    def add_row(self) -> int:
        """An empty row at the end of the batch -> its index."""
        return self._append_row(Row(self.pool))

    def fork_row(self, row: int) -> int:
        """A copy of a row at the end of the batch, sharing its blocks -> its index."""
        self._forget_step()
        return self._append_row(self._row(row).copy())

    def free_row(self, row: int) -> None:
        """Take a row out of the batch and release its blocks; the rows after it move down by one."""
        self._forget_step()
        self._row(row).keep(0)
        del self.rows[row]
        self._table = None

    def match_prefix(self, row: int, ids) -> int:
        """Give an empty row the full blocks in the pool that begin `ids` -> the number of tokens it now has.

        At most len(ids) - 1: one token is left to compute. Feed the rest, ids[n:], as usual.
        """
        self._forget_step()
        if n := self._row(row).length:
            raise ValueError(f"row {row} has {n} tokens already: a prefix is matched into an empty row")
        self._table = None
        return self.rows[row].match_prefix([int(i) for i in ids])

    def commit(self, row: int, ids) -> None:
        """Register the row's full blocks, which hold `ids`, so that match_prefix can find them, even when freed."""
        if len(ids) < (n := self._row(row).length):
            raise ValueError(f"row {row} has {n} tokens, only {len(ids)} ids are given: name them all")
        self.rows[row].commit([int(i) for i in ids])

    def fork(self) -> PagedCache:
        """A second cache over the same pool, sharing every block."""
        self._forget_step()
        twin = PagedCache(1, self.max_length, pool=self.pool)
        twin.rows = [row.copy() for row in self.rows]
        twin.dtype, twin.device = self.dtype, self.device
        return twin

    def __del__(self):
        """A cache that nobody holds any more, a fork for instance, gives its blocks back."""
        for row in getattr(self, "rows", ()) if self.owns_rows else ():
            row.keep(0)

    def _append_row(self, row: Row) -> int:
        self._forget_step()
        self.rows.append(row)
        self._table = None
        return len(self.rows) - 1

    def _row(self, row: int) -> Row:
        if not 0 <= row < len(self.rows):
            raise ValueError(f"row {row} does not exist; rows run from 0 to {len(self.rows) - 1}")
        return self.rows[row]

    def _reorder(self, rows: list[int]) -> None:
        old, self.rows = self.rows, [self.rows[r].copy() for r in rows]
        for row in old:
            row.keep(0)
        self._table = None

    def _rewind(self, n: list[int]) -> None:
        for row, x in zip(self.rows, n):
            row.keep(-(-(row.length - x) // self.block_size))
        self._table = None

    def _clear(self, rows: Tensor, pos: Tensor) -> None:
        for row in set(rows.tolist()):
            self.rows[row].stale = True  # its last block may be another's too: cleared when the row writes to it

    # ---- bytes

    def nbytes_by(self) -> dict[str, int]:
        return {
            "keys": sum(x.nbytes for x in self.pool.k.values()),
            "values": sum(x.nbytes for x in self.pool.v.values()),
            "tables": 0 if self._table is None else self._table.nbytes,
        }

    @property
    def nbytes_in_use(self) -> int:
        """Bytes of the blocks that this cache's tables name, each once."""
        return len({block for row in self.rows for block in row.table}) * self.pool.block_bytes
