"""The block pool of a paged cache: who owns which block, and what is in it (vLLM's block manager, arXiv 2309.06180)."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from torch import Tensor

from kvlab.config import check_int
from kvlab.words import kind_of


class PoolExhausted(RuntimeError):
    """No free block is left. Nothing was allocated; every sequence is as it was."""


class BlockPool:
    """num_blocks blocks of block_size tokens each, shared by all sequences and by several caches if you like.

    A block id means the same block in every layer. Keys and values of one layer: (n_kv, num_blocks, block_size, D),
    heads first, so that one index_select along the blocks gathers a sequence. Every block is either free (reference
    count 0) or in use (one count for each block table entry that names it).
    A freed block keeps its content until it is needed, so that a later request with the same prefix finds it:
    `free` is ordered, least recently freed first.
    """

    def __init__(self, num_blocks: int, block_size: int = 16):
        check_int("num_blocks", num_blocks)
        check_int("block_size", block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.k: dict[int, Tensor] = {}  # layer -> (n_kv, num_blocks, block_size, D)
        self.v: dict[int, Tensor] = {}
        self.key_of: dict[int, bytes] = {}  # block -> hash of all token ids from the start of the text to its end
        self.block_of: dict[bytes, int] = {}  # the other way round

    # ---- allocation

    def check_free(self, n: int) -> None:
        """Raises PoolExhausted unless n blocks are free."""
        if n > len(self.free):
            raise PoolExhausted(
                f"{n} more blocks of {self.block_size} tokens are needed and {len(self.free)} of {self.num_blocks} "
                "are free: free a row, or make the pool larger (num_blocks)"
            )

    def allocate(self, n: int) -> list[int]:
        """n blocks with reference count 1, all or none."""
        self.check_free(n)
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.forget(block)
            self.ref[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more table names this block; a freed block whose content is still there comes back to life."""
        self.free.pop(block, None)
        self.ref[block] += 1

    def release(self, block: int) -> None:
        """One table less names this block."""
        if self.ref[block] < 1:
            raise RuntimeError(f"block {block} is released once more than it was shared")
        self.ref[block] -= 1
        if self.ref[block] == 0:
            self.free[block] = None

    # ---- content

    def storage(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """This layer's keys and values, made on first use to fit k, v (B, n_kv, T, D)."""
        if layer not in self.k:
            for held, x in ((self.k, k), (self.v, v)):
                held[layer] = x.new_zeros(x.shape[1], self.num_blocks, self.block_size, x.shape[3])
        for name, held, x in (("keys", self.k[layer], k), ("values", self.v[layer], v)):
            if (held.dtype, held.device) != (x.dtype, x.device):
                raise ValueError(f"{name} are {x.dtype} on {x.device}, the pool holds {held.dtype} on {held.device}")
            if (held.shape[0], held.shape[3]) != (x.shape[1], x.shape[3]):
                raise ValueError(
                    f"{name} have {x.shape[1]} heads of {x.shape[3]}, the pool holds {held.shape[0]} of "
                    f"{held.shape[3]}: a pool serves one model"
                )
        return self.k[layer], self.v[layer]

    def copy(self, source: int, target: int) -> int:
        """Copy a block's content in all layers -> bytes copied."""
        copied = 0
        for x in (*self.k.values(), *self.v.values()):
            x[:, target] = x[:, source]
            copied += x[:, source].nbytes
        return copied

    def clear(self, blocks: list[int], start: int = 0) -> None:
        """Zeros in all layers, from place `start` of the blocks on: an earlier row may have left NaN there, and a NaN
        in a masked slot poisons a row."""
        for x in (*self.k.values(), *self.v.values()):
            if blocks:
                x[:, blocks, start:] = 0

    @staticmethod
    def chain(before: bytes, ids: list[int]) -> bytes:
        """The key of a full block: a hash of the key before it and its own token ids.

        The chain makes equal ids after another prefix differ, as their keys and values do. SHA-256, as in vLLM: with a
        weaker hash two texts could meet in one block.
        """
        return hashlib.sha256(before + b"".join(int(i).to_bytes(8, "little") for i in ids)).digest()

    def register(self, block: int, key: bytes) -> None:
        """Record that `block` is full and holds the text with this key. The first block to say so keeps it."""
        if key not in self.block_of:
            self.forget(block)
            self.block_of[key] = block
            self.key_of[block] = key

    def find(self, ids: list[int]) -> tuple[list[int], list[bytes]]:
        """The full blocks that begin `ids`, at most len(ids) - 1 tokens of it, and their keys. Takes nothing."""
        blocks, key, bs = {}, b"", self.block_size
        for start in range(0, (len(ids) - 1) // bs * bs, bs):
            key = self.chain(key, ids[start : start + bs])
            if key not in self.block_of:
                break
            blocks[key] = self.block_of[key]
        return list(blocks.values()), list(blocks)

    def forget(self, block: int) -> None:
        """The block's content is about to change: no prefix may find it any more."""
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key]

    # ---- checks

    def check(self, tables: list[list[int]]) -> None:
        """Raises RuntimeError unless the books balance with these block tables, which must be all that there are."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        for block, (ref, count) in enumerate(zip(self.ref, counts)):
            if ref != count:
                raise RuntimeError(f"block {block} has reference count {ref}, but {count} table entries name it")
            if (ref == 0) != (block in self.free):
                raise RuntimeError(
                    f"block {block} has reference count {ref} and is {'' if ref else 'not '}in the free list"
                )
        for block, key in self.key_of.items():
            if self.block_of.get(key) != block:
                raise RuntimeError(f"block {block} is registered under a prefix that names another block")
        if len(self.key_of) != len(self.block_of):
            raise RuntimeError(f"{len(self.block_of)} prefixes are registered for {len(self.key_of)} blocks")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(x[:, 0].nbytes for x in (*self.k.values(), *self.v.values()))

    @property
    def used_blocks(self) -> int:
        return self.num_blocks - len(self.free)


def pool_for(pool: BlockPool | None, num_blocks: int | None, block_size: int, rows: int, max_length: int) -> BlockPool:
    """The pool that is given, or a new one: of num_blocks, or with room for `rows` rows of max_length tokens."""
    if pool is None:
        if num_blocks is None:  # a block_size that is none is for the pool to refuse
            good = isinstance(block_size, int) and block_size > 0
            num_blocks = rows * -(-max_length // block_size) if good else 1
        return BlockPool(num_blocks, block_size)
    if not isinstance(pool, BlockPool):
        raise TypeError(f"pool is {kind_of(pool)}, not a BlockPool")
    if num_blocks is not None:
        raise ValueError(f"num_blocks={num_blocks} and a pool, which has its own {pool.num_blocks}: give one of them")
    return pool
