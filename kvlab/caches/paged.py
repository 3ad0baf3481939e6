"""PagedAttention's cache: each row has a block table, and blocks come from a shared pool as they are needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.attention import View
from kvlab.caches.base import KVCache, Step, bytes_per_token, slot_is_position
from kvlab.caches.pool import BlockPool


@dataclass
class Row:
    """One sequence: its blocks in order, and its length. Position p lives in block table[p // block_size]."""

    length: int = 0
    table: list[int] = field(default_factory=list)


class PagedCache(KVCache):
    """Rows take blocks of block_size tokens from a pool, so that at most one block per row is partly empty (vLLM).

    Blocks may be shared: fork() and fork_row() copy tables, not keys, and a shared block is copied when one of its owners
    writes to it (copy on write); match_prefix() takes over full blocks that an earlier row has left behind.
    Rows come and go: add_row(), fork_row(), free_row().
    A step allocates all it needs before the first layer writes, or raises PoolExhausted with every row as it was.
    Bytes: the pool's keys and values num_blocks*block_size*n_kv*D*itemsize each per layer; tables 8*B*(longest table).
    Copied per layer and step: the gathered blocks, B*(longest table)*block_size*one; and each block copied on write.
    max_length sizes a pool of the cache's own: batch_size rows of that length. pool: take blocks from that one instead.
    """

    def __init__(
        self,
        batch_size: int = 1,
        max_length: int = 1024,
        block_size: int = 16,
        num_blocks: int | None = None,
        pool: BlockPool | None = None,
    ):
        if pool is not None and num_blocks is not None:
            raise ValueError(
                f"num_blocks={num_blocks} and pool are given: the pool has its own {pool.num_blocks} blocks"
            )
        self.rows: list[Row] = []
        super().__init__(batch_size, max_length)
        if pool is None:
            enough = num_blocks is None and isinstance(block_size, int) and block_size > 0
            pool = BlockPool(batch_size * -(-max_length // block_size) if enough else num_blocks, block_size)
        self.pool = pool
        self.block_size = self.pool.block_size
        self._table: Tensor | None = None  # the block tables as one tensor (B, longest), made anew when they change

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self.rows = self.rows or [Row() for _ in lengths]
        for row, length in zip(self.rows, lengths):
            row.length = length

    # --- one step --------------------------------------------------------------------------------------------------

    def _blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _needs(self, step: Step) -> tuple[list[int], list[tuple[int, int]]]:
        """New blocks per row, and the shared blocks (row, index in table) that the step writes into."""
        new = [max(0, self._blocks(n) - len(row.table)) for row, n in zip(self.rows, step.after)]
        shared = [
            (r, start // self.block_size)
            for r, (start, after) in enumerate(zip(step.start, step.after))
            if after > start
            and start % self.block_size
            and self.pool.ref[self.rows[r].table[start // self.block_size]] > 1
        ]
        return new, shared

    def _check_room(self, step: Step) -> None:
        new, shared = self._needs(step)
        if sum(new) + len(shared) > len(self.pool.free):
            self.pool.allocate(sum(new) + len(shared))  # raises, and says what is missing

    def _begin(self, step: Step) -> None:
        pool, bs, device = self.pool, self.block_size, step.pos.device
        new, shared = self._needs(step)
        fresh = pool.allocate(sum(new) + len(shared))
        self._undo_list = []
        for r, i in shared:  # copy on write
            table, old = self.rows[r].table, self.rows[r].table[i]
            table[i] = fresh.pop()
            self.bytes_copied += pool.copy(old, table[i])
            pool.release(old)
            self._undo_list.append((r, i, old))
        for r, (row, n) in enumerate(zip(self.rows, new)):
            self._undo_list.append((r, len(row.table), None))
            row.table += [fresh.pop() for _ in range(n)]
            if step.after[r] > step.start[r] and step.start[r] % bs:
                pool.forget(row.table[step.start[r] // bs])  # written to: no longer what it was registered as
        if self._table is None or any(new) or shared or self._table.device != device:
            self._table = self._table_tensor(device)
        rows, columns = step.real
        pos = step.pos[rows, columns]
        self.at = self._table[rows, pos // bs] * bs + pos % bs  # slot of each new token in the pool
        self.real = None if step.uniform else (rows, columns)
        self.view_pos = slot_is_position(step.after, max(step.after), device)

    def _table_tensor(self, device) -> Tensor:
        """(B, longest); short tables are filled with block 0, which position -1 hides."""
        longest = max(len(row.table) for row in self.rows)
        return torch.tensor(
            [row.table + [0] * (longest - len(row.table)) for row in self.rows], dtype=torch.int64, device=device
        )

    def _write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> View:
        B, n = k.shape[0], self.view_pos.shape[1]
        longest = self._table.shape[1]
        parts = []
        for held, x in zip(self.pool.storage(layer, k, v), (k, v)):
            n_kv, _, bs, D = held.shape
            new = (
                x.transpose(0, 1).reshape(n_kv, -1, D)
                if self.real is None
                else x[self.real[0], :, self.real[1]].transpose(0, 1)
            )
            held.view(n_kv, -1, D).index_copy_(1, self.at, new)
            blocks = held.index_select(1, self._table.flatten())  # (n_kv, B*longest, block_size, D)
            parts.append(blocks.view(n_kv, B, longest * bs, D).transpose(0, 1)[:, :, :n])
            self.bytes_copied += blocks.nbytes
        self.bytes_read += sum(step.after) * bytes_per_token(k, v)
        return View(*parts, self.view_pos, all_visible=step.uniform and step.pos.shape[1] == 1)

    def _undo(self, step: Step) -> None:
        for r, i, old in reversed(self._undo_list):
            table = self.rows[r].table
            if old is None:
                self._drop(self.rows[r], i)
            else:
                self.pool.release(table[i])
                self.pool.share(old)
                table[i] = old
        self._table = None

    # --- rows ------------------------------------------------------------------------------------------------------

    def _drop(self, row: Row, keep: int) -> None:
        """Release all blocks of the row but the first `keep`, the last one first: prefixes survive longest."""
        while len(row.table) > keep:
            self.pool.release(row.table.pop())
        self._table = None

    def _copy(self, row: Row) -> Row:
        for block in row.table:
            self.pool.share(block)
        return Row(row.length, list(row.table))

    def add_row(self) -> int:
        """An empty row at the end of the batch -> its index."""
        self.abort()
        self.rows.append(Row())
        self._table = None
        return len(self.rows) - 1

    def fork_row(self, row: int) -> int:
        """A copy of a row at the end of the batch, sharing its blocks -> its index."""
        self.abort()
        self.rows.append(self._copy(self._row(row)))
        self._table = None
        return len(self.rows) - 1

    def free_row(self, row: int) -> None:
        """Take a row out of the batch and release its blocks; the rows after it move down by one."""
        self.abort()
        self._drop(self._row(row), 0)
        del self.rows[row]

    def _row(self, row: int) -> Row:
        if not 0 <= row < len(self.rows):
            raise ValueError(f"row {row} does not exist; rows run from 0 to {len(self.rows) - 1}")
        return self.rows[row]

    def _reorder(self, rows: list[int]) -> None:
        old = self.rows
        self.rows = [self._copy(old[r]) for r in rows]
        for row in old:
            self._drop(row, 0)

    def _rewind(self, n: list[int]) -> None:
        for row, x in zip(self.rows, n):
            self._drop(row, self._blocks(row.length - x))

    def fork(self) -> PagedCache:
        """A second cache over the same pool, sharing every block."""
        self.abort()
        twin = PagedCache(1, self.max_length, pool=self.pool)
        twin.rows = [self._copy(row) for row in self.rows]
        twin.dtype, twin.device = self.dtype, self.device
        return twin

    # --- shared prefixes -------------------------------------------------------------------------------------------

    def match_prefix(self, row: int, ids) -> int:
        """Give an empty row the full blocks in the pool that begin `ids` -> the number of tokens it now has.

        At most len(ids) - 1: one token must be left to compute, or there would be no logits to go on from.
        """
        ids, r = [int(i) for i in ids], self._row(row)
        if r.length:
            raise ValueError(f"row {row} has {r.length} tokens already: a prefix is matched into an empty row")
        key, bs = b"", self.block_size
        for start in range(0, (len(ids) - 1) // bs * bs, bs):
            key = self.pool.chain(key, ids[start : start + bs])
            if key not in self.pool.block_of:
                break
            block = self.pool.block_of[key]
            self.pool.share(block)
            r.table.append(block)
            r.length += bs
        self._table = None
        return r.length

    def commit(self, row: int, ids) -> None:
        """Register the row's full blocks, which hold `ids`, so that other rows can find them."""
        ids, r = [int(i) for i in ids], self._row(row)
        if len(ids) < r.length:
            raise ValueError(f"row {row} has {r.length} tokens, only {len(ids)} ids are given: name them all")
        key, bs = b"", self.block_size
        for i in range(r.length // bs):
            key = self.pool.chain(key, ids[i * bs : (i + 1) * bs])
            self.pool.register(r.table[i], key)

    # --- bytes -----------------------------------------------------------------------------------------------------

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
