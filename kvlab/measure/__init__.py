"""The lab's instruments: time, memory, FLOPs and bandwidth, with the same meaning on CUDA, MPS and CPU."""

# Not lazy: every instrument needs torch, and several functions share their module's name (`kvlab.measure.sweep` is the
# function), which a lazy lookup would lose as soon as somebody imports the module first. `import kvlab` stays lazy.
from .about import about, best_device, best_dtype
from .allocation import Memory, live_tensors_bytes, memory
from .bandwidth import Bandwidth, bandwidth, device_memory
from .budget import Budget, budget
from .flops import FlopCount, count_flops
from .sweep import Record, Slope, fit_slope, sweep
from .timing import SampledSteps, Timing, interleaved, time_call, time_steps

__all__ = [
    "Bandwidth",
    "Budget",
    "FlopCount",
    "Memory",
    "Record",
    "SampledSteps",
    "Slope",
    "Timing",
    "about",
    "bandwidth",
    "best_device",
    "best_dtype",
    "budget",
    "count_flops",
    "device_memory",
    "fit_slope",
    "interleaved",
    "live_tensors_bytes",
    "memory",
    "sweep",
    "time_call",
    "time_steps",
]
