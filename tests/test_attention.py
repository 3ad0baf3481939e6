"""The one mask, the one attention and rotary positions, each against arithmetic written out."""

import math

import pytest
import torch
from oracles import turn

from kvlab.attention import View, attend, narrower, rope, rope_angles, rope_frequencies, visible


def test_visible_is_its_definition():
    rng = torch.Generator().manual_seed(0)
    for window in (None, 1, 2, 5):
        for sinks in (0, 1, 3):
            q = torch.randint(-1, 12, (2, 5), generator=rng)
            k = torch.randint(-1, 12, (2, 9), generator=rng)
            mask = visible(q, k, window, sinks)
            assert mask.shape == (2, 1, 5, 9) and mask.dtype == torch.bool
            for b in range(2):
                for i, qp in enumerate(q[b].tolist()):
                    for j, kp in enumerate(k[b].tolist()):
                        near = window is None or qp - kp < window or kp < sinks
                        assert mask[b, 0, i, j] == (0 <= kp <= qp and near)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_w_is_w_keys_the_querys_own_included(window):
    pos = torch.arange(12)[None]
    assert visible(pos, pos, window).sum(-1).flatten().tolist() == [min(p + 1, window) for p in range(12)]
    with_sinks = visible(pos, pos, window, 2).sum(-1).flatten().tolist()
    assert with_sinks == [min(p + 1, window + 2) for p in range(12)]


def test_order_and_holes_do_not_matter():
    q = torch.tensor([[6, 7]])
    k = torch.tensor([[7, -1, 2, 5, -1, 0]])
    assert visible(q, k, 3)[0, 0].tolist() == [
        [False, False, False, True, False, False],
        [True, False, False, True, False, False],
    ]


def test_heads_that_keep_different_tokens():
    q, k = torch.tensor([[3]]), torch.tensor([[[0, 1, -1], [2, 3, 4]]])
    assert visible(q, k).tolist() == [[[[True, True, False]], [[True, True, False]]]]


def test_narrower():
    assert [narrower(*x) for x in ((None, None), (3, None), (None, 3), (2, 3), (3, 2))] == [None, 3, 3, 2, 2]


def example(B=2, H=4, n_kv=2, T=3, S=7, D=8, Dv=6):
    rng = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(s, generator=rng, dtype=torch.float64) for s in ((B, H, T, D), (B, n_kv, S, D), (B, n_kv, S, Dv))
    )
    q_pos = torch.arange(S - T, S).expand(B, T)
    return q, View(k, v, torch.arange(S).expand(B, S)), visible(q_pos, torch.arange(S).expand(B, S))


@pytest.mark.parametrize("n_kv", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attend_against_loops(n_kv, scale):
    q, view, mask = example(n_kv=n_kv)
    view.scale = scale
    y = attend(q, view, mask)
    y2, weights = attend(q, view, mask, want_weights=True)
    assert y.shape == (2, 4, 3, 6) and weights.shape == (2, n_kv, 3, 7)
    torch.testing.assert_close(y, y2, rtol=0, atol=1e-14)
    summed = torch.zeros_like(weights)
    for b in range(2):
        for h in range(4):
            for t in range(3):
                kv, seen = h // (4 // n_kv), [s for s in range(7) if mask[b, 0, t, s]]
                assert seen == list(range(7 - 3 + t + 1))
                scores = torch.stack([q[b, h, t] @ view.k[b, kv, s] for s in seen]) * (scale or 1 / math.sqrt(8))
                w = scores.softmax(0)
                torch.testing.assert_close(y[b, h, t], w @ view.v[b, kv, seen], rtol=0, atol=1e-13)
                summed[b, kv, t, seen] += w
    torch.testing.assert_close(weights, summed, rtol=0, atol=1e-13)


def test_no_mask_means_all_is_seen():
    q, view, _ = example(T=1)
    torch.testing.assert_close(attend(q, view), attend(q, view, torch.ones(2, 1, 1, 7, dtype=torch.bool)))


@pytest.mark.parametrize("want_weights", [False, True])
def test_a_query_that_sees_nothing_is_finite_and_alone(want_weights):
    q, view, mask = example()
    mask = mask.expand(2, 1, 3, 7).clone()
    full = attend(q, view, mask)
    mask[0, 0, 1] = False
    y = attend(q, view, mask, want_weights)
    y = y[0] if want_weights else y
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y[0, :, [0, 2]], full[0, :, [0, 2]], rtol=0, atol=1e-14)
    torch.testing.assert_close(y[1], full[1], rtol=0, atol=1e-14)


# ---- rotary positions


def test_frequencies():
    freq = rope_frequencies(8, 10000.0)
    assert freq.dtype == torch.float64 and freq.shape == (4,)
    want = [10000.0 ** (-2 * i / 8) for i in range(4)]
    torch.testing.assert_close(freq, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(rope_frequencies(8, scaling={"rope_type": "linear", "factor": 4.0}), freq / 4)
    torch.testing.assert_close(rope_frequencies(8, scaling={"type": "linear", "factor": 4.0}), freq / 4)
    with pytest.raises(ValueError, match="rope_scaling type 'yarn' is not supported; known are 'default', 'linear'"):
        rope_frequencies(8, scaling={"rope_type": "yarn", "factor": 2.0})


def test_llama3_scaling_by_wavelength():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    plain, got = rope_frequencies(128, 500000.0), rope_frequencies(128, 500000.0, scaling)
    for f, g in zip(plain.tolist(), got.tolist()):
        wavelength = 2 * math.pi / f
        if wavelength < 8192 / 4:
            want = f
        elif wavelength > 8192 / 1:
            want = f / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            want = (1 - smooth) * f / 8 + smooth * f
        assert math.isclose(g, want, rel_tol=1e-5)
    assert got[0] == plain[0] and math.isclose(got[-1], plain[-1] / 8, rel_tol=1e-6)


def test_rope_is_a_complex_turn():
    x = torch.randn(1, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    freq, pos = rope_frequencies(8), torch.tensor([[0, 3, 7, 100, 5000]])
    got = rope(x, rope_angles(pos, freq, torch.float64))
    want = turn(x[0].transpose(0, 1), pos[0], freq).transpose(0, 1)[None]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    assert torch.equal(got[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))


def test_turning_twice_adds_the_angles_and_only_distance_counts():
    x = torch.randn(1, 2, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    freq = rope_frequencies(8)

    def at(p, y):
        return rope(y, rope_angles(torch.tensor([[p]]), freq, torch.float64))

    torch.testing.assert_close(at(5, at(7, x)), at(12, x), rtol=0, atol=1e-14)
    q, k = x[:, :1], x[:, 1:]
    near = (at(13, q) * at(9, k)).sum()
    far = (at(1013, q) * at(1009, k)).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-12)


def test_angles_of_half_types_are_computed_in_float32():
    """In bf16 itself positions beyond 256 would fall together."""
    cos, _ = rope_angles(torch.tensor([[1000, 1001]]), rope_frequencies(8), torch.bfloat16)
    assert cos.dtype == torch.bfloat16 and cos[0, 0, 0, 0] != cos[0, 0, 1, 0]
    assert abs(float(cos[0, 0, 1, 0]) - math.cos(1001)) < 0.005
