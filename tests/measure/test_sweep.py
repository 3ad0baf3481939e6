"""No point of a sweep is lost, and slopes come back from data made with them."""

import gc
import time
import weakref

import pytest
import torch

from kvlab.measure import fit_slope, sweep
from kvlab.measure.sweep import out_of_memory


def test_every_point_has_a_record_in_the_order_given():
    records = sweep([3, 1, 2], lambda n: n * n, progress=False)
    assert [(r.point, r.value, r.status, r.ok) for r in records] == [(n, n * n, "ok", True) for n in (3, 1, 2)]
    assert sweep([], lambda n: n) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to ..."
        ),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 80000000000 bytes."),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "windows", "mps", "cublas", "python"],
)
def test_a_point_that_does_not_fit_is_kept_and_the_sweep_goes_on(error):
    def fn(n):
        if n == 2:
            raise error
        return n

    records = sweep([1, 2, 3], fn, progress=False)
    assert [r.status for r in records] == ["ok", "did not fit", "ok"]
    assert records[1].value is None and not records[1].ok


def test_a_real_allocation_that_does_not_fit():
    records = sweep([10, 2**60], lambda n: torch.empty(n, dtype=torch.uint8).numel(), progress=False)
    assert [r.status for r in records] == ["ok", "did not fit"]


def test_what_a_failed_point_held_is_freed_before_the_next():
    held, alive = [], []

    def fn(n):
        alive.append(held[0]() is not None if held else None)
        big = torch.zeros(1000)
        held.append(weakref.ref(big.untyped_storage()))
        if n == 1:
            raise MemoryError
        return n

    gc.disable()
    try:
        sweep([1, 2], fn, progress=False)
    finally:
        gc.enable()
    assert alive == [None, False]


def test_other_errors_pass_through_and_named_ones_count_as_too_large():
    class PoolExhausted(RuntimeError):
        pass

    def fn(n):
        raise PoolExhausted("no free block")

    with pytest.raises(PoolExhausted):
        sweep([1], fn, progress=False)
    assert sweep([1], fn, progress=False, did_not_fit=(PoolExhausted,))[0].status == "did not fit"
    assert not out_of_memory(RuntimeError("shape mismatch")) and not out_of_memory(ValueError("out of memory"))


def test_points_not_reached_are_marked_never_dropped(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def fn(n):
        clock[0] += n
        return n

    records = sweep([4, 5, 6, 7], fn, seconds=8, progress=False)
    assert [r.status for r in records] == ["ok", "ok", "not run: out of time", "not run: out of time"]
    assert [r.seconds for r in records] == [4, 5, 0, 0] and records[3].value is None
    assert sweep([100, 1], fn, seconds=0.001, progress=False)[0].ok  # one point always runs
    with pytest.raises(ValueError, match="seconds=0"):
        sweep([1], fn, seconds=0)


def test_the_bar_is_quiet_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "ipykernel", raising=False)
    sweep([1, 2], lambda n: n, label="length")
    assert capsys.readouterr() == ("", "")


def test_in_a_notebook_the_bar_is_one_line_of_text_without_widgets(monkeypatch):
    import IPython.display

    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    monkeypatch.setitem(__import__("sys").modules, "ipykernel", object())
    monkeypatch.setattr(IPython.display, "display", lambda data, raw, display_id: shown.append(data) or Handle())
    sweep([1, 2], lambda n: n, label="length")
    assert all(set(data) == {"text/plain"} for data in shown)
    assert any("length" in data["text/plain"] for data in shown) and shown[-1]["text/plain"] == ""


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_slope_of_a_power_law_is_its_exponent(power):
    x = [32, 64, 128, 256]
    fit = fit_slope(x, [5e-6 * n**power for n in x])
    assert fit.slope == pytest.approx(power, abs=1e-12) and fit.error == pytest.approx(0, abs=1e-10)
    assert fit(100) == pytest.approx(5e-6 * 100**power)


def test_slope_and_error_equal_an_independent_least_squares_fit():
    x = torch.tensor([10.0, 20, 40, 80, 160, 320], dtype=torch.float64)
    noise = torch.tensor([0.1, -0.2, 0.05, 0.15, -0.1, 0.02], dtype=torch.float64)
    y = 3 * x**1.7 * noise.exp()
    design = torch.stack([torch.ones_like(x), x.log()], 1)
    beta = torch.linalg.lstsq(design, y.log()).solution
    residual = ((y.log() - design @ beta) ** 2).sum() / (len(x) - 2)
    error = (residual * torch.linalg.inv(design.T @ design)[1, 1]).sqrt()
    fit = fit_slope(x.tolist(), y.tolist())
    assert (fit.slope, fit.error) == pytest.approx((beta[1].item(), error.item()), rel=1e-10)
    assert "6 points, 10 to 320" in str(fit)


def test_a_slope_is_fitted_over_its_range_only_and_skips_missing_points():
    x = [1, 2, 4, 8, 16, 32, 64]
    y = [9.0, 9.0, 16, 64, 256, None, 4096]  # overhead hides the quadratic below 4; 32 did not fit
    fit = fit_slope(x, y, between=(4, 64))
    assert fit.slope == pytest.approx(2) and fit.points == 4 and fit.between == (4, 64)
    assert fit_slope(x, y).slope < 1.9


@pytest.mark.parametrize("x, y", [([1, 2], [1, 2]), ([1, 2, 3], [1, 0, 3]), ([1, 2], [1]), ([2, 2, 2], [1, 2, 3])])
def test_a_slope_that_cannot_be_fitted_says_why(x, y):
    with pytest.raises(ValueError, match="3 different x|greater than 0|as many"):
        fit_slope(x, y)
