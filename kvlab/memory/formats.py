"""Number formats with their true cost: what one stored row of values really takes, scales included. Loads no torch.

"8-bit" and "4-bit" are names, not sizes. A format that shares a scale among a block of values pays for the scale:
llama.cpp's q8_0 puts one fp16 scale beside 32 int8 values, 34 bytes, so it saves 1.88x over fp16, not 2x; q4_0 saves
3.56x.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .reading import ConfigError


@dataclass(frozen=True)
class Format:
    """`block` values take `block_bytes` bytes, scales and zero points included; a part block costs a whole one."""

    name: str
    block_bytes: int
    block: int
    note: str = ""

    @property
    def bits(self) -> float:
        """Bits per value when blocks are full."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, values: int) -> int:
        """Bytes of one row of `values` numbers: rows do not share blocks (a row is one token's heads in one layer)."""
        return -(-values // self.block) * self.block_bytes


_PLAIN = [
    Format("fp32", 4, 1),
    Format("fp16", 2, 1),
    Format("bf16", 2, 1),
    Format("fp8_e4m3", 1, 1, "vLLM, TGI: one scale a tensor, none stored with the tokens"),
    Format("fp8_e5m2", 1, 1, "vLLM, TGI: no scale"),
    Format("q8_0", 34, 32, "llama.cpp: fp16 scale, 32 int8"),
    Format("q6_0", 26, 32, "ik_llama.cpp: fp16 scale, 32 x 6 bits"),
    Format("q5_1", 24, 32, "llama.cpp: fp16 scale and minimum, 32 x 5 bits"),
    Format("q5_0", 22, 32, "llama.cpp: fp16 scale, 32 x 5 bits"),
    Format("q4_1", 20, 32, "llama.cpp: fp16 scale and minimum, 32 x 4 bits"),
    Format("q4_0", 18, 32, "llama.cpp: fp16 scale, 32 x 4 bits"),
    Format("iq4_nl", 18, 32, "llama.cpp: fp16 scale, 32 x 4 bits into a table"),
    Format("mxfp8", 33, 32, "OCP microscaling: one 8-bit exponent for 32 values"),
    Format("mxfp4", 17, 32, "OCP microscaling: one 8-bit exponent for 32 values"),
    Format("fp8_ds_mla", 656, 576, "vLLM's sparse MLA row: 512 fp8, 4 fp32 scales, 64 bf16 rotary values"),
    Format("nvfp4", 9, 16, "4 bits, one fp8 scale for 16 values"),
]
FORMATS = {f.name: f for f in _PLAIN}
_ALIASES = {
    "float32": "fp32",
    "f32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "f16": "fp16",
    "half": "fp16",
    "auto": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3fnuz": "fp8_e4m3",
    "fp8_e5m2fnuz": "fp8_e5m2",
    "float8_e5m2": "fp8_e5m2",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "q8": "q8_0",
    "q4": "q4_0",
}
_GROUPED = re.compile(r"(?:u?int|i)(8|4|3|2)(?:(?:/|-g|_g)(\d+))?")
GROUP = 32  # values that share an fp16 scale and an fp16 zero point when the name states no group


def number_format(name: str) -> Format:
    """The format of this name, in any case: "fp16", "q8_0", "int4" (groups of 32), "int4/64", "fp8", "nvfp4", ...

    int8, int4, int3 and int2 carry one fp16 scale and one fp16 zero point for each group: int4/32 is 5 bits a value.
    Raises ConfigError that lists the known names.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a number format is a name such as 'fp16' or 'q8_0', not {name!r}")
    key = name.strip().lower().removeprefix("torch.")
    key = _ALIASES.get(key, key)
    if key in FORMATS:
        return FORMATS[key]
    if grouped := _GROUPED.fullmatch(key):
        bits, group = int(grouped[1]), int(grouped[2] or GROUP)
        if group < 1 or bits * group % 8:
            raise ConfigError(f"{name!r}: a group of {group} values of {bits} bits does not fill whole bytes")
        return Format(f"int{bits}/{group}", bits * group // 8 + 4, group, "fp16 scale and zero point for each group")
    raise ConfigError(
        f"unknown number format {name!r}; known are {', '.join(FORMATS)}, and int8, int4, int2 or int4/64"
    )


def kv_formats(text) -> tuple[Format, Format]:
    """(format of keys, format of values): "q8_0" for both, "q8_0:q4_0" or "K q8_0 / V q4_0" apart."""
    if isinstance(text, tuple | list) and len(text) == 2:
        return number_format(text[0]), number_format(text[1])
    if not isinstance(text, str):
        raise ConfigError(f"kv_dtype={text!r} must be a name such as 'fp16', or two as in 'q8_0:q4_0'")
    spelled = re.fullmatch(r"\s*K\s+(\S+)\s*/\s*V\s+(\S+)\s*", text, re.IGNORECASE)
    parts = list(spelled.groups()) if spelled else text.split(":")
    if len(parts) > 2:
        raise ConfigError(f"kv_dtype={text!r} names more than two formats; write one, or K:V")
    return number_format(parts[0]), number_format(parts[-1])


def weight_format(name: str) -> Format:
    """As number_format, with the names of weight files: "awq" and "gptq" (int4/128), "int8" per row, "q4_k_m", "nf4".

    llama.cpp's k-quant mixtures are averages over a whole model: q4_k_m 4.85 bits, q5_k_m 5.69, q6_k 6.56, q8_0 8.5.
    """
    key = str(name).strip().lower()
    if key in _WEIGHTS:
        return _WEIGHTS[key]
    return number_format(name)


_WEIGHTS = {
    "int8": Format("int8", 8, 8, "one scale a row: too few to count"),
    "int4": Format("int4", 66, 128, "fp16 scale for 128 values (AWQ, GPTQ); zero points packed with them"),
    "nf4": Format("nf4", 33, 64, "bitsandbytes: 4 bits and an 8-bit scale for 64 values (double quantization)"),
    "q4_k_m": Format("q4_k_m", 97, 160, "llama.cpp mixture, average"),
    "q5_k_m": Format("q5_k_m", 1138, 1600, "llama.cpp mixture, average"),
    "q6_k": Format("q6_k", 210, 256, "llama.cpp: 256 x 6 bits, 16 scales, one fp16"),
}
_WEIGHTS["awq"] = _WEIGHTS["gptq"] = _WEIGHTS["w4a16"] = _WEIGHTS["int4"]
