"""The exercises of notebook 05: wrong answers that readers give, and the sentence that each gets."""

import pytest
import torch

import kvlab
from kvlab.caches.codecs import make_codec
from kvlab.exercise_quantized import sealed_token
from kvlab.memory import estimate


def test_the_answer_is_the_calculators():
    assert sealed_token() == estimate("llama-7b", kv_dtype="int4/64").kv_bytes_per_token
    assert sealed_token(8, 32) == estimate("llama-7b", kv_dtype="int8/32").kv_bytes_per_token


@pytest.mark.parametrize(
    "given, words",
    [
        (131072, "codes alone"),
        (131072 + 8192, "4 bytes, not 2"),
        (131072 + 32768, "groups of 32"),
        (147456 / 2, "keys and values both"),
        (262144 + 16384, "half a byte"),
        (4608, "one layer"),
        (147456 * 8, "bits"),
        (524288, "fp16"),
        (10**6, "too large"),
    ],
)
def test_bytes_of_a_token(given, words):
    verdict = kvlab.check_answer("05.1", given)
    assert not verdict.ok and words in repr(verdict)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda c: c[..., 1::2] | (c[..., ::2] << 4), "into the low"),
        (lambda c: c[..., ::2] | c[..., 1::2], "shift one of them by 4"),
        (lambda c: c[..., : c.shape[-1] // 2] | (c[..., c.shape[-1] // 2 :] << 4), "neighbours share a byte"),
        (lambda c: c, "two codes a byte"),
        (lambda c: c[..., ::2].int() + 16 * c[..., 1::2].int(), "4 bytes a number"),
        (lambda c: c[..., ::2].to(torch.int8) + 16 * c[..., 1::2].to(torch.int8), "of another kind"),
        (lambda c: c[..., ::2] | (c[..., 1::2] << 3), "The codes 1 and 15 make"),
        (lambda c: c[0], "has shape"),
        (lambda c: c.tolist(), "a list"),
        (lambda: 0, "raised TypeError"),
        (torch.ones(2), "the function"),
    ],
)
def test_packing(wrong, words):
    verdict = kvlab.check_answer("05.2", wrong)
    assert not verdict.ok and words in repr(verdict), verdict


def per_channel(k, bits, group, dim=2, least=1e-8, zero=True, rounding=torch.round):
    x = k.unflatten(1, (-1, group))
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    if not zero:
        low, high = -x.abs().amax(dim, keepdim=True), x.abs().amax(dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=least)
    return (low + scale * rounding((x - low) / scale)).flatten(1, 2)


def the_caches_own(k, bits, group):
    codec = make_codec(bits, "channel", group, k.shape[-1])
    return codec.decode(*codec.encode(k[None]), dtype=k.dtype)[0]


def symmetric(k, bits, group):
    """Signed codes around 0 with a scale alone."""
    x = k.unflatten(1, (-1, group))
    scale = x.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
    return (scale * (x / scale).round()).flatten(1, 2)


@pytest.mark.parametrize("right", [per_channel, the_caches_own, lambda *a: per_channel(*a).double()])
def test_right_rounding_passes_however_it_is_done(right):
    assert kvlab.check_answer("05.3", right).ok


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda *a: per_channel(*a, dim=3), "outlier channel spoils its neighbours"),
        (lambda *a: per_channel(*a, least=0), "in the channel that is constant"),
        (lambda *a: per_channel(*a, zero=False), "Is there a zero point?"),
        (symmetric, "Is there a zero point?"),
        (lambda *a: per_channel(*a, rounding=torch.floor), "at most"),
        (lambda k, b, g: per_channel(k, b, 32), "all tokens share one scale"),
        (lambda k, b, g: k, "different numbers"),
        (lambda k, b, g: per_channel(k, b, g)[:, :16], "must return a tensor of shape"),
        (lambda k, b, g: k.tolist(), "a list"),
        (lambda k: k, "raised TypeError"),
        (3, "the function"),
    ],
)
def test_rounding_per_channel(wrong, words):
    verdict = kvlab.check_answer("05.3", wrong)
    assert not verdict.ok and words in repr(verdict), verdict


@pytest.mark.parametrize("id", ["05.2", "05.3"])
def test_blank_functions_get_guidance(id):
    assert not kvlab.check_answer(id, lambda *a: ...).answered
