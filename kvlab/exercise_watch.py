"""The exercises of notebook 03: memory over time. Each answer is computed from kvlab when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.exercise_kinds import Blank, Function, Number

MIB = 2**20


def tooth(tokens: int = 4096) -> int:
    """Bytes that a growing cache of LLaMA-7B takes for a moment, beyond what it then holds, to add one token."""
    from kvlab.exercise_list import llama_7b
    from kvlab.staircase import heights

    (row,) = heights("growing", llama_7b(), [tokens + 1], tokens + 1)
    return row.peak - row.held - 8 * tokens  # the positions are no keys or values


def _tooth_mistakes():
    right = tooth() / MIB
    return [
        (right * 32, "that is the whole cache; torch.cat copies one layer, frees the old tensors, and goes on."),
        (right * 64, "that is the whole cache twice; it is there once all the time, and one layer of it twice."),
        (right / 2, "keys and values both: this cache frees the old pair when both new ones are made."),
        (right * 2, "those are fp32 bytes, or two copies beside the one that stays; the question is about fp16."),
        (right * MIB, "those are bytes; the answer is in MiB."),
        (right / 128, "that is what one token adds for good; the question is what is needed for a moment."),
        (right / 32, "every KV head of a layer is in the copy."),
    ]


def one_tensor(nbytes: int) -> tuple[int, int]:
    """(allocated, reserved) of the caching allocator after one request, simulated."""
    from kvlab.caching_allocator import CachingAllocator

    allocator = CachingAllocator()
    allocator.malloc(nbytes)
    return allocator.allocated, allocator.reserved


def _r512(n):
    return -(-n // 512) * 512


def _segment(n):
    return 2 * MIB if n <= MIB else 20 * MIB if n < 10 * MIB else -(-n // (2 * MIB)) * 2 * MIB


@dataclass(frozen=True)
class Trim:
    """The answer is a function last_tokens(k, n) -> the last n tokens of k (B, n_kv, S, D), pinning nothing else."""

    title: str
    well_done: str
    hints: tuple[str, ...]

    def check(self, given) -> tuple[bool, list[str]]:
        import torch

        if not callable(given):
            return False, ["The answer is the function last_tokens(k, n) itself."]
        k = torch.arange(2 * 3 * 10 * 4.0).view(2, 3, 10, 4)
        for n in (4, 1, 10, 0):
            call = f"last_tokens(k, {n}) of keys (2, 3, 10, 4)"
            try:
                out = given(k.clone(), n)
            except Exception as error:
                return False, [f"{call} raised {type(error).__name__}: {error}."]
            if out is None or out is ...:
                raise Blank(f"{call} returns nothing yet: it must return a tensor (2, 3, {n}, 4).")
            if not isinstance(out, torch.Tensor):
                return False, [f"{call} must return a tensor, not a {type(out).__name__}."]
            wanted = k[:, :, 10 - n :]
            if out.shape != wanted.shape:
                zero = " In Python -0 is 0, so x[-0:] is all of x." if n == 0 and out.shape == k.shape else ""
                return False, [f"{call} has shape {tuple(out.shape)}, not {tuple(wanted.shape)}.{zero}"]
            if not torch.equal(out, wanted):
                first = n < 10 and torch.equal(out, k[:, :, :n])
                return False, ["Those are the first tokens; keep the last." if first else f"{call} has other numbers."]
            held = out.untyped_storage().nbytes()
            if held > out.nbytes:
                return False, [f"A view: its {out.nbytes:,} bytes keep a storage of {held:,} alive, all ten tokens."]
        return True, [self.well_done]


WATCH_EXERCISES = {
    "03.1": Number(
        "How many MiB more than it holds afterwards does a growing cache of LLaMA-7B need to add one token to 4,096?",
        lambda: tooth() / MIB,
        "One layer of 32: the tooth. It grows with the text, as the cache does.",
        (
            "torch.cat makes a new tensor and leaves the old one as it is. When is the old one freed?",
            "The cache goes through the layers one after the other: only one layer is there twice at a time.",
            "4,096 tokens x 512 KiB are the cache; one of its 32 layers is the answer.",
        ),
        _tooth_mistakes,
        "MiB",
    ),
    "03.2": Function(
        "What do memory_allocated and memory_reserved say after one tensor of nbytes on a new CUDA device?",
        "one_tensor(nbytes) -> (allocated, reserved)",
        ("allocated", "reserved"),
        ((1,), (1000,), (MIB,), (MIB + 1,), (9 * MIB,), (12 * MIB,), (24 * MIB + 1,)),
        one_tensor,
        "As the rule says. A tensor of one byte reserves 2 MiB, one of 1 MiB and a byte reserves 20.",
        (
            "allocated: nbytes rounded up to a multiple of 512. -(-n // 512) rounds the quotient up.",
            "reserved: 2 MiB up to 1 MiB, 20 MiB below 10 MiB, and above that rounded up to a multiple of 2 MiB.",
            "return a, 2 * MIB if a <= MIB else 20 * MIB if a < 10 * MIB else -(-a // (2 * MIB)) * 2 * MIB",
        ),
        mistakes=(
            (lambda n: (n, n), "nothing is handed out to the byte: 512 bytes are the least, and the step."),
            (lambda n: (_r512(n), _r512(n)), "the driver is asked for whole segments: 2 MiB, 20 MiB, or more."),
            (lambda n: (n // 512 * 512, _segment(n // 512 * 512)), "round up, not down."),
            (lambda n: (_r512(n), 2 * MIB), "2 MiB are for requests of up to 1 MiB alone."),
            (lambda n: (_r512(n), max(1, -(-n // (2 * MIB))) * 2 * MIB), "requests over 1 MiB and under 10 MiB "
             "are served from segments of 20 MiB."),
            (lambda n: (_r512(n), 2 * MIB if n <= MIB else 20 * MIB), "a request of 10 MiB or more gets a segment of "
             "its own, rounded up to 2 MiB."),
            (lambda n: (_r512(n), 2 * MIB if n < MIB else _segment(n + 1)), "1 MiB itself still belongs to the small "
             "pool."),
        ),
        confusions=((lambda n: one_tensor(n)[::-1], "the numbers are swapped: reserved is the larger one."),),
    ),
    "03.3": Trim(
        "Write last_tokens(k, n): the last n tokens of keys (B, KV heads, S, head_dim), and the others can be freed.",
        "Right values, and a storage of just that size: the old one can be freed.",
        (
            "k[:, :, S - n:] has the right values. Whose storage does it use?",
            ".clone() copies a view into a storage of its own size. (.contiguous() copies only if it must.)",
            "return k[:, :, k.shape[2] - n :].clone()",
        ),
    ),
}  # fmt: skip
