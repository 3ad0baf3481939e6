"""What machine is this, how much should be measured on it, and how fast does it read."""

import subprocess
import sys

import pytest
import torch

from kvlab import measure
from kvlab.measure import about, bandwidth, best_device, best_dtype, budget


def test_about_is_one_line_with_the_versions():
    line = about("cpu")
    assert "\n" not in line and torch.__version__ in line and "kvlab" in line
    assert ".".join(map(str, sys.version_info[:3])) in line and f"{torch.get_num_threads()} thread" in line


def test_the_environment_chooses_the_device(monkeypatch):
    monkeypatch.setenv("KVLAB_DEVICE", "cpu")
    assert best_device() == torch.device("cpu")
    for wrong in ("gpu", "cuda:999", "meta", "cuda:x", "cpu:1"):
        monkeypatch.setenv("KVLAB_DEVICE", wrong)
        with pytest.raises(ValueError, match=f"KVLAB_DEVICE='{wrong}'"):
            best_device()


def test_cuda_comes_before_mps_before_the_cpu(monkeypatch):
    monkeypatch.delenv("KVLAB_DEVICE", raising=False)
    for cuda, mps, expected in [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert best_device().type == expected


@pytest.mark.parametrize(
    "capability, dtype", [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_a_card_without_bfloat16_computes_in_float16(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert best_dtype("cuda") == getattr(torch, dtype)
    assert (best_dtype("cpu"), best_dtype("mps")) == (torch.float32, torch.float16)


def test_the_budget_follows_the_device_and_the_environment(monkeypatch):
    monkeypatch.delenv("KVLAB_BUDGET", raising=False)
    assert (budget("cpu").name, budget("cuda").name, budget("mps").name) == ("quick", "full", "full")
    monkeypatch.setenv("KVLAB_BUDGET", "full")
    full = budget("cpu")
    monkeypatch.setenv("KVLAB_BUDGET", "quick")
    quick = budget("cpu")
    assert (full.name, quick.name) == ("full", "quick") and set(quick.lengths) < set(full.lengths)
    assert quick.max_length == quick.lengths[-1] >= 512 and quick.seconds < full.seconds
    for each in (full, quick, budget("cuda")):
        assert list(each.lengths) == sorted(set(each.lengths)) and each.repeats >= 3


def test_a_misspelt_budget_is_refused(monkeypatch):
    monkeypatch.setenv("KVLAB_BUDGET", "fast")
    with pytest.raises(ValueError, match="KVLAB_BUDGET='fast'.*'quick' or 'full'"):
        budget("cpu")


def test_bandwidth_reports_what_it_read():
    result = bandwidth("cpu", nbytes=2**22, repeats=3)
    assert result.nbytes == 2**22 and len(result.timing.times) == 3
    assert result.bytes_per_second == result.nbytes / result.timing.median
    assert result.seconds(result.bytes_per_second) == pytest.approx(1.0)
    assert "GB/s" in str(result) and "4 MiB" in str(result)
    for bad in (1000, 2**60):
        with pytest.raises(ValueError, match="half of the"):
            bandwidth("cpu", nbytes=bad)


def test_a_function_keeps_its_name_when_its_module_is_imported():
    """`kvlab.measure.sweep` is the function, whatever was imported before."""
    names = ["about", "bandwidth", "budget", "sweep"]
    code = f"import kvlab.measure as m, {', '.join('kvlab.measure.' + n for n in names)}"
    code += "".join(f"; assert callable(m.{n})" for n in names)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_everything_exported_is_there():
    assert all(callable(getattr(measure, name)) for name in measure.__all__)
