"""Which machine, which numbers, which versions: the line that every saved output carries."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch


def best_device() -> torch.device:
    """CUDA if there, then MPS, then CPU. The environment variable KVLAB_DEVICE (cpu, cuda, cuda:1, mps) overrides.

    Raises ValueError if KVLAB_DEVICE names no device, or one that this machine lacks.
    """
    if wanted := os.environ.get("KVLAB_DEVICE"):
        return device_named(wanted, "KVLAB_DEVICE")
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def device_named(text: str, where: str = "device") -> torch.device:
    """The device that `text` names (cpu, cuda, cuda:N, mps). ValueError if there is none; `where` says who asked."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda", "mps") or (index and not index.isdecimal()):
        raise ValueError(f"{where}={text!r} names no device: use cpu, cuda, cuda:N or mps")
    count = 1
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif kind == "mps":
        count = int(torch.backends.mps.is_available())
    if int(index or 0) >= count:  # asked of the text: torch.device("cuda:999") wraps its number without a word
        raise ValueError(f"{where}={text!r}, but this machine has {count or 'no'} {kind} device{'s' * (count > 1)}")
    return torch.device(text)


def device_for(device=None) -> torch.device:
    """The device that was asked for (a name or a torch.device), or the best one. ValueError if it is not there."""
    return best_device() if device is None else device_named(str(device))


def best_dtype(device=None) -> torch.dtype:
    """The dtype to run a model in: float32 on a CPU, bfloat16 on a GPU, float16 where it lacks that (T4, V100, MPS).

    "Lacks" means no arithmetic units for it: emulation exists on older cards and is slow.
    """
    device = torch.device(device) if device is not None else best_device()
    if device.type == "cuda":
        return torch.bfloat16 if _has_bf16(device) else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def _has_bf16(device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere and later


def about(device=None) -> str:
    """One line: device, its size, the dtypes it computes in, and the versions that produced an output."""
    device = torch.device(device) if device is not None else best_device()
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        dtypes = "fp32, fp16, bf16" if _has_bf16(device) else "fp32, fp16 (no bf16)"
        machine = f"{card.name}, {card.total_memory / 2**30:.0f} GiB · {dtypes}"
    else:
        threads = torch.get_num_threads()
        kind = f"{_cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' * (threads > 1)}"
        machine = f"{kind} · {'fp32, fp16 on its GPU (mps)' if device.type == 'mps' else 'fp32'}"
    return f"{machine} · torch {torch.__version__} · Python {platform.python_version()} · kvlab {_kvlab_version()}"


def _cpu_name() -> str:
    try:
        if platform.system() == "Linux":
            with open("/proc/cpuinfo") as info:
                for line in info:
                    if line.startswith(("model name", "Model")):
                        return line.split(":", 1)[1].strip()
        elif platform.system() == "Darwin":
            return subprocess.check_output(["sysctl", "-n", "machdep.cpu.brand_string"], text=True).strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine() or "CPU"


def _kvlab_version() -> str:
    try:
        return version("kvlab")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "(not installed)"
