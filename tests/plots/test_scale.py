"""Ticks a person would choose, and labels that do not cover each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.plots.scale import Scale, scale_for, spread


def texts(*args, most=6):
    return [text for _, text in Scale(*args).ticks(most)]


def test_ticks_are_round_in_the_unit_shown():
    assert texts(0, 100) == ["0", "20", "40", "60", "80", "100"]
    assert texts(0, 3.2 * 2**30, "linear", "B") == ["0 B", "1 GiB", "2 GiB", "3 GiB"]
    assert texts(16, 131072, "log2", "tokens", most=5) == ["16", "128", "1,024", "8,192", "65,536"]
    assert texts(0.01, 900, "log10", "s") == ["10 ms", "100 ms", "1 s", "10 s", "100 s"]
    assert texts(1e9, 2e15, "log10", "FLOP") == ["10 G", "1 T", "100 T"]
    assert texts(0, 3, "linear", "tokens") == ["0", "0.5", "1", "1.5", "2", "2.5", "3"]


@given(st.floats(1e-9, 1e18), st.floats(1.5, 1e12), st.sampled_from(["linear", "log2", "log10"]),
       st.sampled_from(["", "B", "s", "FLOP", "tokens"]))  # fmt: skip
def test_ticks_lie_on_the_axis_in_order_and_are_few(lo, factor, kind, unit):
    scale = Scale(lo, lo * factor, kind, unit)
    values = [v for v, _ in scale.ticks()]
    assert values == sorted(set(values)) and len(values) <= 13
    assert all(-1e-6 <= scale.at(v) <= 1 + 1e-6 for v in values)


@given(st.lists(st.floats(-50, 150), min_size=1, max_size=12), st.floats(1, 30))
def test_labels_keep_their_distance_and_their_order(places, gap):
    out = spread(places, gap, 0, 100)
    real = min(gap, 100 / max(len(places) - 1, 1))
    in_order = [y for _, y in sorted(zip(places, out, strict=True))]
    assert all(b - a >= real - 1e-6 for a, b in zip(sorted(out), sorted(out)[1:], strict=False))
    assert min(out) >= -1e-6 and max(out) <= 100 + 1e-6
    assert in_order == sorted(in_order) or len(set(places)) < len(places)


def test_labels_far_apart_do_not_move_and_a_pair_parts_evenly():
    assert spread([10, 50, 90], 20, 0, 100) == [10, 50, 90]
    assert spread([50, 50, 10], 20, 0, 100) == [40, 60, 10]


def test_an_axis_without_usable_values_still_exists():
    assert scale_for([None, float("nan")], {}).hi > 0
    assert scale_for([0, None], {"scale": "log10"}).lo > 0
    flat = scale_for([5, 5], {"scale": "log2"})
    assert flat.lo < 5 < flat.hi
    with pytest.raises(ValueError, match="'sqrt'"):
        scale_for([1], {"scale": "sqrt"})
