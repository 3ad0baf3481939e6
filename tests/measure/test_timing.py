"""The clock's arithmetic and its order of work. No test asserts how long anything took."""

import statistics

import pytest
import torch

from kvlab.measure import SampledSteps, Timing, interleaved, time_call, time_steps


def test_a_timing_is_a_median_with_its_spread():
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert (timing.median, timing.min, timing.quartiles) == (3.0, 1.0, (2.0, 4.0))
    assert Timing((7.0,)).quartiles == (7.0, 7.0)
    assert "5 repeats" in str(timing) and "3 s" in str(timing) and "ms" in str(Timing((2e-3,)))
    with pytest.raises(ValueError, match="at least one"):
        Timing(())


def test_one_outlier_does_not_move_the_median():
    assert Timing((1.0, 1.0, 1.0, 1.0, 1000.0)).median == 1.0


def test_warm_up_calls_are_not_among_the_times():
    calls = []
    timing = time_call(lambda: calls.append(1), repeats=4, warmup=3, number=2, device="cpu")
    assert len(timing.times) == 4 and len(calls) == 3 + 4 * 2
    assert all(seconds >= 0 for seconds in timing.times)


def test_interleaved_sides_take_turns_and_none_is_always_first():
    order = []
    timings = interleaved(
        {name: lambda name=name: order.append(name) for name in "abc"}, repeats=3, warmup=1, device="cpu"
    )
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert list(timings) == ["a", "b", "c"] and all(len(t.times) == 3 for t in timings.values())


@pytest.mark.parametrize("bad", [{"repeats": 0}, {"warmup": -1}, {"number": 0}, {"repeats": 1.5}, {"repeats": True}])
def test_senseless_counts_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        time_call(lambda: None, device="cpu", **bad)


def test_the_clock_reads_the_function_it_was_given(monkeypatch):
    now = iter([10.0, 10.25, 20.0, 21.0])
    monkeypatch.setattr("kvlab.measure.timing.time.perf_counter", lambda: next(now))
    assert time_call(lambda: None, repeats=2, warmup=0, device="cpu").times == (0.25, 1.0)


def test_sampled_steps_equal_the_exact_sum_when_every_step_is_sampled():
    cost = [0.1 * n**2 for n in range(1, 41)]
    assert SampledSteps(tuple(range(1, 41)), tuple(cost)).total == pytest.approx(sum(cost), rel=1e-12)


def test_sampled_steps_are_exact_for_a_linear_cost_and_close_for_a_curved_one():
    linear = SampledSteps((16, 100, 512), tuple(3.0 + 2.0 * n for n in (16, 100, 512)))
    assert linear.total == pytest.approx(sum(3.0 + 2.0 * n for n in range(16, 513)), rel=1e-12)
    lengths = (16, 32, 64, 128, 256, 384, 512)
    exact = sum(n**2 for n in range(16, 513))
    curved = SampledSteps(lengths, tuple(float(n**2) for n in lengths)).total
    assert exact <= curved <= 1.06 * exact  # chords lie above a convex curve


def test_cumulative_time_ends_at_the_total_and_says_what_was_sampled():
    steps = SampledSteps((2, 4), (1.0, 3.0))
    assert steps.cumulative() == ([2, 3, 4], [1.0, 3.0, 6.0])
    assert steps.total == 6.0 and steps.sampled == 2 and steps.step(3) == 2.0
    with pytest.raises(ValueError, match="5 lies outside the sampled range 2 to 4"):
        steps.step(5)


def test_bad_samples_are_refused():
    with pytest.raises(ValueError, match="ascend"):
        SampledSteps((4, 2), (1.0, 1.0))
    with pytest.raises(ValueError, match="2 lengths and 1 times"):
        SampledSteps((1, 2), (1.0,))
    with pytest.raises(ValueError, match="at least 1"):
        time_steps(lambda n: None, [0, 4], device="cpu")


def test_time_steps_runs_only_the_sampled_lengths():
    ran = []
    steps = time_steps(ran.append, [8, 2, 4, 2], repeats=2, warmup=1, device="cpu")
    assert steps.lengths == (2, 4, 8)
    assert ran == [2] * 3 + [4] * 3 + [8] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device, whose events this reads")
def test_on_cuda_the_clock_waits_for_the_work():
    a = torch.randn(4096, 4096, device="cuda")
    small, large = interleaved(
        {"one": lambda: a @ a, "ten": lambda: [a @ a for _ in range(10)]}, device="cuda"
    ).values()
    assert statistics.median(large.times) > 3 * small.median  # a clock that does not wait reads the same for both
