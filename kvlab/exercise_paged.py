"""The exercises of notebook 07: a token's slot, the blocks that a step takes, what a prefix can give."""

from __future__ import annotations

from kvlab.exercise_kinds import Function, Number

TABLE, BLOCK_SIZE, POSITION = (7, 3, 11, 4), 16, 37


def slot_of(table: tuple[int, ...], block_size: int, p: int) -> int:
    """Where a PagedCache with this block table puts the token at position p."""
    return table[p // block_size] * block_size + p % block_size


def blocks_needed(tokens: int, new: int, block_size: int) -> tuple[int]:
    """How many blocks a row of `tokens` tokens takes when `new` more are to be written, asked of a Row."""
    from kvlab.caches.pool import BlockPool
    from kvlab.caches.row import Row

    row = Row(BlockPool(-(-tokens // block_size) or 1, block_size))
    row.grow(tokens)
    return (row.needs(tokens + new),)


def matched(prompt: int, common: int, block_size: int) -> tuple[int]:
    """Tokens that a prompt of `prompt` tokens finds when an earlier text of which it has the first `common` tokens in
    common left its blocks behind, asked of a pool."""
    from kvlab.caches.pool import BlockPool
    from kvlab.caches.row import Row

    pool = BlockPool(common // block_size + 2, block_size)
    early, late = list(range(common)) + [10**6], list(range(common)) + [10**7] * (prompt - common)
    first = Row(pool)
    first.grow(len(early))
    first.length = len(early)
    first.commit(early)
    first.keep(0)
    return (Row(pool).match_prefix(late),)


def _slot_mistakes():
    b, i, rest = BLOCK_SIZE, POSITION // BLOCK_SIZE, POSITION % BLOCK_SIZE
    return [
        (POSITION, "that is the position in the text; the block table says where its block lies in the pool."),
        (TABLE[i] * b, "that is the first slot of the right block; add the place inside it, 37 % 16."),
        (TABLE[i - 1] * b + rest, "that is entry 1 of the table; counting starts at 0, and 37 // 16 is 2."),
        (TABLE[i + 1] * b + rest, "that is entry 3 of the table; 37 // 16 is 2."),
        (TABLE[0] * b + POSITION, "that takes the blocks as neighbours from the first on; each lies anywhere."),
        (TABLE[i] + rest, "a block has 16 slots: the block's number times 16 is its first."),
        (TABLE[i], "that is the block; its slots are 16 times as many."),
    ]  # fmt: skip


PAGED_EXERCISES = {
    "07.1": Number(
        "Blocks of 16, block table [7, 3, 11, 4]: which slot of the pool holds the token at position 37?",
        lambda: slot_of(TABLE, BLOCK_SIZE, POSITION),
        "One division for the entry of the table, its remainder for the place in the block: that is all of paging.",
        (
            "Which entry of the table is it? Positions 0 to 15 lie in the block of entry 0.",
            "37 // 16 is the entry, 37 % 16 the place in its block.",
            "Slot = table[37 // 16] * 16 + 37 % 16.",
        ),
        _slot_mistakes,
    ),
    "07.2": Function(
        "How many new blocks does a row take before it writes `new` tokens?",
        "blocks_needed(tokens, new, block_size) -> blocks",
        ("blocks",),
        ((15, 1, 16), (16, 1, 16), (17, 1, 16), (0, 33, 16), (31, 2, 16), (48, 16, 16), (5, 0, 4), (7, 9, 1)),
        blocks_needed,
        "Counted from what the row will hold and what its table has: no case for the boundary is left.",
        (
            "How many blocks does a row of `tokens` tokens have? And one of tokens + new?",
            "n tokens take n / block_size blocks, rounded up; in Python -(-n // block_size).",
            "The difference of the two. Try 16 + 1 and 15 + 1 by hand.",
        ),
        mistakes=(
            (lambda t, n, b: (int((t + n) % b == 0),), "a block that has just become full needs no other yet: the new "
             "one is due when the next token is to be written."),
            (lambda t, n, b: ((t + n) // b - t // b,), "that counts the blocks that become full; taken are those that "
             "are begun. A row of 16 needs its second block for token 17."),
            (lambda t, n, b: (-(-n // b),), "the last block of the row may have room left."),
            (lambda t, n, b: (-(-(t + n) // b),), "that is all of its blocks; some it has already."),
            (lambda t, n, b: ((t + n) // b + 1 - (t // b + 1),), "a row of 16 tokens has one block of 16, not two."),
            (lambda t, n, b: (int(t % b == 0),), "that is right for one new token; several may need several blocks, or "
             "reach the next one from the middle of a block."),
            (lambda t, n, b: (int(t % b + n > b),), "several new tokens may need more than one block, and an empty row "
             "has none yet."),
            (lambda t, n, b: (n // b,), "round up, and see what room is left in the last block."),
        ),
    ),
    "07.3": Function(
        "How many tokens of a prompt need not be computed, if an earlier text began alike?",
        "matched(prompt, common, block_size) -> tokens",
        ("tokens",),
        ((40, 35, 16), (40, 32, 16), (32, 32, 16), (33, 32, 16), (20, 15, 16), (48, 48, 8), (7, 7, 1), (1, 1, 1)),
        matched,
        "Full blocks only, and never the last token: somebody must ask the model what comes next.",
        (
            "Only full blocks have a key. How many full blocks are there in `common` tokens?",
            "A prompt that is found whole would leave nothing to compute, and there would be no logits.",
            "So at most prompt - 1 tokens, and whole blocks of them: min(common, prompt - 1) // block_size blocks.",
        ),
        mistakes=(
            (lambda p, c, b: (c // b * b,), "a prompt that is found whole leaves nothing to compute, and no logits to "
             "go on from: at least one token must be left."),
            (lambda p, c, b: (min(c, p - 1),), "only full blocks are shared: the last one is still written to."),
            (lambda p, c, b: (c,), "only full blocks are shared, and one token of the prompt must be left."),
            (lambda p, c, b: (min(c // b * b, p - 1),), "close: a block is found whole or not at all, so that a prompt "
             "found whole gives back its last block."),
            (lambda p, c, b: (c // b,), "those are blocks; the question is about tokens, and one token must be left."),
            (lambda p, c, b: (min(c, p - 1) // b,), "those are blocks; the question is about tokens."),
            (lambda p, c, b: (-(-c // b) * b,), "the last block is not full: it has no key yet."),
            (lambda p, c, b: ((c - 1) // b * b,), "one token of the *prompt* must be left: a longer one may take all "
             "blocks that are in common."),
        ),
    ),
}  # fmt: skip
