"""Counted FLOPs against closed forms on a tiny transformer written here, sharing no code with the lab's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kvlab.measure import count_flops

B, H, KV, D, HIDDEN, FF, VOCAB = 2, 4, 2, 8, 32, 48, 50
GRAD_MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


class Tiny(nn.Module):
    """One layer: q, k, v, o, up, down and head. `path` chooses how attention is computed."""

    def __init__(self, path, dtype=torch.float32):
        super().__init__()
        self.path = path
        self.embed = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.q, self.k, self.v, self.o, self.up, self.down, self.head = (
            nn.Linear(a, b, bias=bias, dtype=dtype)
            for a, b, bias in [
                (HIDDEN, H * D, True),
                (HIDDEN, KV * D, False),
                (HIDDEN, KV * D, False),
                (H * D, HIDDEN, False),
                (HIDDEN, FF, False),
                (FF, HIDDEN, True),
                (HIDDEN, VOCAB, False),
            ]
        )

    def forward(self, ids, past=None):
        x = self.embed(ids)
        heads = lambda y: y.view(*y.shape[:2], -1, D).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.silu(self.up(x)))), (k, v)

    def attend(self, q, k, v):
        b, h, t, d = q.shape
        if self.path == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        if self.path == "masked":
            return F.scaled_dot_product_attention(q, k, v, torch.ones(t, k.shape[2], dtype=torch.bool), enable_gqa=True)
        folded = q.reshape(b, KV, h // KV * t, d)  # the group's queries as extra rows
        if self.path == "folded":
            return F.scaled_dot_product_attention(folded, k, v).reshape(q.shape)
        if self.path == "explicit":
            return (torch.softmax(folded @ k.mT * d**-0.5, -1) @ v).reshape(q.shape)
        weights = torch.einsum("bhtd,bhsd->bhts", folded, k).softmax(-1)
        return torch.einsum("bhts,bhsd->bhtd", weights, v).reshape(q.shape)


def projections(tokens):
    return 2 * tokens * (HIDDEN * H * D + 2 * HIDDEN * KV * D + H * D * HIDDEN + 2 * HIDDEN * FF + HIDDEN * VOCAB)


def attention(batch, t, s):
    return 2 * batch * H * t * s * D * 2


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("path", ["sdpa", "masked", "folded", "explicit", "einsum"])
def test_prefill_decode_and_uncached_have_their_closed_forms(path, dtype, grad_mode):
    model, prompt, new = Tiny(path, dtype), 7, 5
    with grad_mode():
        with count_flops() as prefill:
            _, past = model(torch.zeros(B, prompt, dtype=torch.long))
        with count_flops() as decode:
            for _ in range(new):
                _, past = model(torch.zeros(B, 1, dtype=torch.long), past)
        with count_flops() as uncached:
            for n in range(prompt, prompt + new):
                model(torch.zeros(B, n, dtype=torch.long))
    assert (prefill.projections, prefill.attention) == (projections(B * prompt), attention(B, prompt, prompt))
    seen = sum(range(prompt + 1, prompt + new + 1))
    assert (decode.projections, decode.attention) == (projections(B * new), attention(B, 1, seen))
    lengths = range(prompt, prompt + new)
    assert uncached.projections == projections(B * sum(lengths))
    assert uncached.attention == sum(attention(B, n, n) for n in lengths)
    assert uncached.total == sum(uncached.by_op.values())


@pytest.mark.parametrize("path", ["sdpa", "explicit", "einsum"])
def test_one_row_one_token(path):
    """Batch 1, T = 1: products shrink to matrix x vector, and must keep their term."""
    model = Tiny(path)
    with torch.no_grad():
        _, past = model(torch.zeros(1, 6, dtype=torch.long))
        with count_flops() as f:
            model(torch.zeros(1, 1, dtype=torch.long), past)
    assert (f.projections, f.attention) == (projections(1), attention(1, 1, 7))


def test_why_not_torch_s_counter():
    """Once torch counts this kernel, our rule for it can go."""
    q = torch.randn(1, 2, 4, 8)
    with FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(q, q, q)
    with count_flops() as ours:
        F.scaled_dot_product_attention(q, q, q)
    assert theirs.get_total_flops() == 0
    assert ours.attention == 2 * 2 * 2 * 4 * 4 * 8


def test_values_may_be_narrower_than_keys():
    """MLA: keys of 24, values of 16."""
    q, k, v = torch.randn(1, 4, 3, 24), torch.randn(1, 4, 9, 24), torch.randn(1, 4, 9, 16)
    for attend in (F.scaled_dot_product_attention, lambda q, k, v: (q @ k.mT).softmax(-1) @ v):
        with count_flops() as f:
            attend(q, k, v)
        assert (f.attention, f.projections) == (2 * 4 * 3 * 9 * (24 + 16), 0)


def test_vectors_and_dots_are_counted_too():
    w, x, bias = nn.Parameter(torch.randn(5, 8)), torch.randn(8), torch.randn(5)
    with torch.no_grad(), count_flops() as f:
        torch.mv(w, x), torch.addmv(bias, w, x), w @ x
    assert (f.projections, f.attention) == (3 * 2 * 40, 0)
    with count_flops() as f:
        torch.dot(x, x), torch.mv(torch.randn(3, 8), x)
    assert (f.projections, f.attention) == (0, 16 + 48)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
def test_what_is_computed_from_weights_alone_is_a_weight(grad_mode):
    a, b, x = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8)), torch.randn(3, 8)
    with grad_mode(), count_flops() as f:
        x @ torch.cat([a, b]).double().float().t()  # fused and cast inside the block
        x @ a[2:6].T.contiguous()
        x @ (a @ b)  # absorbed
    assert (f.projections, f.attention) == (2 * 3 * 8 * 16 + 2 * 3 * 8 * 4 + 2 * 8**3 + 2 * 3 * 64, 0)


def test_a_plain_tensor_is_a_weight_only_if_its_module_is_named():
    module, x = nn.Module(), torch.randn(3, 8)
    module.register_buffer("fused", torch.randn(8, 8))
    with count_flops() as f:
        x @ module.fused
    assert (f.projections, f.attention) == (0, 2 * 3 * 64)
    with count_flops(module) as f:
        x @ module.fused
    assert (f.projections, f.attention) == (2 * 3 * 64, 0)
    with pytest.raises(TypeError, match="not a Tensor"), count_flops(x):
        pass


def test_an_address_used_again_is_not_mistaken_for_a_weight():
    x = torch.randn(4, 8)
    with count_flops() as f:
        for _ in range(50):
            w = nn.Parameter(torch.randn(8, 8))
            with torch.no_grad():
                y = x @ w
            del w, y
            torch.randn(8, 8).mm(torch.randn(8, 8))
    assert f.projections == 50 * 2 * 4 * 64 and f.attention == 50 * 2 * 8**3


def test_the_bias_of_a_product_of_activations_does_not_make_it_a_projection():
    bias, q, k = nn.Parameter(torch.zeros(2, 3, 5)), torch.randn(2, 3, 8), torch.randn(2, 8, 5)
    with torch.no_grad(), count_flops() as f:
        torch.baddbmm(bias, q, k)
    assert (f.projections, f.attention) == (0, 2 * 2 * 3 * 5 * 8)


def test_backward_costs_about_twice_the_forward():
    layer, x = nn.Linear(8, 6), torch.randn(3, 8, requires_grad=True)
    with count_flops() as f:
        layer(x).sum().backward()
    assert f.projections + f.attention == 3 * 2 * 3 * 8 * 6


def test_counting_nothing_is_zero_and_results_are_unchanged():
    model, ids = Tiny("sdpa"), torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        expected = model(ids)[0]
        with count_flops() as f:
            torch.zeros(3).exp().sum()
        assert f.total == 0 and f.by_op == {}
        with count_flops(), torch.inference_mode():
            assert torch.equal(model(ids)[0], expected)
