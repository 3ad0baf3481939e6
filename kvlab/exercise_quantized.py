"""The exercises of notebook 05: bytes with their scales, packing, and scales per channel."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.exercise_kinds import Blank, Number


def sealed_token(bits: int = 4, group: int = 64) -> int:
    """Bytes of one sealed token of LLaMA-7B: codes, and its part of the scales and zero points."""
    from kvlab.exercise_list import llama_7b
    from kvlab.rounding import held

    config, tokens = llama_7b(), 64 * group
    by = held(config, tokens, bits, "channel", group)
    return (by["codes"] + by["scales"]) // tokens


def _bytes_mistakes():
    from kvlab.exercise_list import llama_7b

    full, right = llama_7b().kv_bytes_per_token(2), sealed_token()
    scales = right - full // 4
    return [
        (full // 4, "those are the codes alone; every 64 of them share a scale and a zero point, 4 bytes together."),
        (full // 4 + scales // 2, "a group has a scale and a zero point, fp16 both: 4 bytes, not 2."),
        (full // 4 + scales // 4, "a scale in fp16 takes 2 bytes, and there is a zero point beside it."),
        (
            full // 4 + 2 * scales,
            "that is 8 bytes for a group of 64, or groups of 32; scale and zero point are fp16 here, 4 bytes together.",
        ),
        (right / 2, "keys and values both."),
        (full // 2 + scales, "4 bits are half a byte: two codes share one."),
        (right // 32, "that is one layer; LLaMA-7B has 32."),
        (right * 8, "those are bits."),
        (full, "that is fp16, not rounded at all."),
    ]


@dataclass(frozen=True)
class Pack:
    """The answer is a function pack4(codes): uint8 codes below 16 (..., D) -> uint8 (..., D/2), first code lowest."""

    title: str
    well_done: str
    hints: tuple[str, ...]

    def check(self, given) -> tuple[bool, list[str]]:
        import torch

        from kvlab.caches.codecs import pack

        if not callable(given):
            return False, ["The answer is the function pack4(codes) itself."]
        pairs = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 2)  # (256, 2): every code beside every
        for codes in (torch.tensor([1, 15], dtype=torch.uint8), pairs, pairs.view(4, 32, 4)):
            call = f"pack4(codes) of shape {tuple(codes.shape)}"
            try:
                out = given(codes.clone())
            except Exception as error:
                return False, [f"{call} raised {type(error).__name__}: {error}."]
            if out is None or out is ...:
                raise Blank(f"{call} returns nothing yet: it must return a tensor of half as many bytes.")
            if not isinstance(out, torch.Tensor):
                return False, [f"{call} must return a tensor, not a {type(out).__name__}."]
            right = pack(codes, 4)
            if out.shape != right.shape:
                return False, [f"{call} has shape {tuple(out.shape)}, not {tuple(right.shape)}: two codes a byte."]
            if out.dtype != torch.uint8:
                size = f"{out.element_size()} bytes a number" if out.element_size() > 1 else "of another kind"
                return False, [f"{call} is {out.dtype}, {size}: nothing is saved unless it is torch.uint8."]
            if torch.equal(out, right):
                continue
            if torch.equal(out, pack(codes.flip(-1), 4).flip(-1)):
                return False, ["Every code is there, the first of a pair in the high half; here it goes into the low."]
            if torch.equal(out, codes[..., 0::2] | codes[..., 1::2]):
                return False, ["Both codes lie in the same four bits: shift one of them by 4 first."]
            half = codes.shape[-1] // 2
            if torch.equal(out, codes[..., :half] | (codes[..., half:] << 4)):
                return False, ["You pair the first half with the second half; here neighbours share a byte."]
            at = (out != right).nonzero()[0].tolist()
            pair = codes.unflatten(-1, (-1, 2))[tuple(at)].tolist()
            return False, [f"The codes {pair[0]} and {pair[1]} make {out[tuple(at)].item()}, "
                           f"not {right[tuple(at)].item()}."]  # fmt: skip
        return True, [self.well_done]


@dataclass(frozen=True)
class PerChannel:
    """The answer is round_per_channel(k, bits, group): k (n_kv, S, D) after rounding, a scale per channel and group.

    Judged by what such rounding promises, so that fp16 scales, other zero points and other code all pass.
    """

    title: str
    well_done: str
    hints: tuple[str, ...]

    def check(self, given) -> tuple[bool, list[str]]:
        import torch

        if not callable(given):
            return False, ["The answer is the function round_per_channel(k, bits, group) itself."]
        rng = torch.Generator().manual_seed(0)
        k = torch.randn(2, 32, 8, generator=rng)
        k[..., 3] = 40 + 10 * k[..., 3]  # an outlier channel, far from zero
        k[..., 5] = 0.25  # and a constant one
        k[:, 16:] *= 3  # the second group is larger
        for bits, group in ((4, 16), (2, 16), (8, 8)):
            call = f"round_per_channel(k, {bits}, {group})"
            try:
                out = given(k.clone(), bits, group)
            except Exception as error:
                return False, [f"{call} raised {type(error).__name__}: {error}."]
            if out is None or out is ...:
                raise Blank(f"{call} returns nothing yet: it must return the rounded keys, shaped as k.")
            if not isinstance(out, torch.Tensor) or out.shape != k.shape:
                shape = tuple(out.shape) if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
                return False, [f"{call} must return a tensor of shape {tuple(k.shape)}, not {shape}."]
            if complaint := self._complaint(k, out.to(k.dtype), bits, group):
                return False, [f"{call}: {complaint}"]
        return True, [self.well_done]

    @staticmethod
    def _complaint(k, out, bits, group) -> str:
        import torch

        if not torch.isfinite(out).all():
            where = " in the channel that is constant: its range is 0, and so is your divisor" if (
                not torch.isfinite(out[..., 5]).all() and torch.isfinite(out[..., :5]).all()
            ) else ""  # fmt: skip
            return f"there are NaN or infinite numbers{where}."
        x, y = (t.unflatten(1, (-1, group)) for t in (k, out))  # (n_kv, groups, group, D)
        low, high = x.amin(2), x.amax(2)
        step = (high - low) / (2**bits - 1)
        error = (y - x).abs().amax(2)
        slack = 2e-3 * torch.maximum(high.abs(), low.abs()) + 1e-6  # scale and zero point may be fp16
        bad = error > 0.51 * step + slack
        if bad.any():
            quiet = [c for c in range(8) if c not in (3, 5)]
            wide = (x.amax((2, 3)) - x.amin((2, 3))) / (2**bits - 1)  # what one scale for all channels would have
            if bad[..., quiet].any() and (error[..., quiet] > 0.2 * wide[..., None]).any():
                return "an outlier channel spoils its neighbours: each channel needs a scale of its own."
            alike = (k.amax(1) - k.amin(1)) / (2**bits - 1)
            if (error <= 0.51 * alike[:, None] + slack).all():
                return f"all tokens share one scale: a scale is for a group of {group} tokens."
            far = bad & (torch.arange(8) == 3)  # the channel far from zero says most, where it is bad at all
            h, g, c = (far if far.any() else bad).nonzero()[0].tolist()
            zero = " Is there a zero point? This channel lies far from zero." if c == 3 else ""
            return (f"channel {c} is off by {error[h, g, c]:.3g}; with 2^{bits} codes over its range it need be off by "
                    f"{step[h, g, c] / 2:.3g} at most.{zero}")  # fmt: skip
        most = max(len(y[h, g, :, c].unique()) for h in range(2) for g in range(y.shape[1]) for c in range(8))
        if most > 2**bits:
            return f"a channel has {most} different numbers in one group; {bits} bits can tell {2**bits} apart."
        return ""


QUANTIZED_EXERCISES = {
    "05.1": Number(
        "LLaMA-7B's cache in int4, groups of 64, an fp16 scale and zero point for each: how many bytes is one token?",
        sealed_token,
        "4.5 bits a number: not a quarter of fp16, but 1/3.56.",
        (
            "In fp16 it is 524,288 bytes: 262,144 numbers of 2 bytes.",
            "How many groups of 64 are there among those numbers? Each brings 2 + 2 bytes.",
            "262,144 / 2 bytes of codes, and 262,144 / 64 * 4 bytes beside them.",
        ),
        _bytes_mistakes,
        "bytes",
    ),
    "05.2": Pack(
        "Write pack4(codes): uint8 codes from 0 to 15 (..., D) become bytes (..., D/2), the first of a pair lowest.",
        "All 256 pairs of codes, each in its byte.",
        (
            "codes[..., 0::2] are the first of each pair, codes[..., 1::2] the second.",
            "<< 4 moves four bits up; | puts two numbers together that share no bits.",
            "return codes[..., 0::2] | (codes[..., 1::2] << 4)",
        ),
    ),
    "05.3": PerChannel(
        "Write round_per_channel(k, bits, group): keys (KV heads, S, D) rounded with a scale and a zero point for each "
        "channel of each group of tokens.",
        "Error at most half a step in every channel, the outlier's neighbours unharmed, the constant channel exact.",
        (
            "x = k.unflatten(1, (-1, group)) is (KV heads, groups, group, D); the group's tokens are dimension 2.",
            "low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True); scale = (high - low) / (2**bits - 1).",
            "codes = ((x - low) / scale).round(); what comes back is low + scale * codes. And where scale is 0?",
            "return (low + scale * codes).flatten(1, 2), with scale.clamp(min=1e-8) as the divisor.",
        ),
    ),
}  # fmt: skip
