"""What one layer keeps for one sequence, kind by kind. Each kind knows its bytes; the whole calculator adds them up.

    Attention   keys and values of every token (full), the last `window` tokens (sliding), the current chunk (chunked)
    Latent      one compressed row a token for all heads: DeepSeek's MLA; nothing to divide among GPUs
    Cross       keys and values of the encoder's output: fixed by the input, whatever is generated
    Compressed  a window, and one summary for every so many tokens before it (DeepSeek V4)
    Shared      reads another layer's keys and values: keeps nothing (Gemma 3n, cross-layer attention)
    State       a recurrent state and a short convolution, the same size at any length (Mamba, Gated DeltaNet, RWKV)
    Both        attention and a state side by side in one layer (Falcon-H1)
    NoCache     an MLP, an expert layer, or an encoder's attention

Bytes are for one sequence on one GPU. `tp` is the tensor parallel degree: KV heads are divided among the GPUs, and
replicated once there are more GPUs than heads. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .formats import Format
from .reading import ConfigError


@dataclass(frozen=True)
class Layer:
    """The common face. `kept(s)`: tokens held after s tokens; `token_bytes`: bytes of one held token."""

    kind = "none"

    def kept(self, seq_len: int) -> int:
        return 0

    def token_bytes(self, k: Format, v: Format, tp: int = 1) -> int:
        return 0

    def state_bytes(self, tp: int = 1) -> int:
        return 0

    def kv_bytes(self, seq_len: int, k: Format, v: Format, tp: int = 1, block: int = 1) -> int:
        """Bytes of keys and values after `seq_len` tokens of one sequence, its tokens rounded up to whole blocks."""
        return round_up(self.kept(seq_len), block) * self.token_bytes(k, v, tp)


@dataclass(frozen=True)
class NoCache(Layer):
    pass


@dataclass(frozen=True)
class Shared(Layer):
    kind = "shared"


@dataclass(frozen=True)
class Attention(Layer):
    """kv_heads x head_dim keys and kv_heads x v_head_dim values a token.

    window: keeps the last `window` tokens. chunk: attends inside chunks of this many tokens, so keeps one at most.
    index_dim: one extra key a token for a sparse-attention index (DeepSeek V3.2), held whole and not divided.
    """

    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    index_dim: int = 0

    @property
    def kind(self) -> str:
        return "sliding" if self.window else "chunked" if self.chunk else "full"

    def kept(self, seq_len: int) -> int:
        return min(seq_len, self.window or self.chunk or seq_len)

    def token_bytes(self, k: Format, v: Format, tp: int = 1) -> int:
        heads = heads_per_gpu(self.kv_heads, tp)
        index = k.row_bytes(self.index_dim) if self.index_dim else 0
        return k.row_bytes(heads * self.head_dim) + v.row_bytes(heads * self.v_head_dim) + index


@dataclass(frozen=True)
class Cross(Attention):
    """Decoder attention over an encoder's output: `kept` counts input tokens, not generated ones."""

    kind = "cross"


@dataclass(frozen=True)
class Latent(Layer):
    """MLA: `rank` latent and `rope_dim` rotary values a token, stored once (no factor 2) and whole on every GPU."""

    rank: int
    rope_dim: int
    window: int | None = None
    index_dim: int = 0
    kind = "latent"

    def kept(self, seq_len: int) -> int:
        return min(seq_len, self.window or seq_len)

    def token_bytes(self, k: Format, v: Format, tp: int = 1) -> int:
        index = k.row_bytes(self.index_dim) if self.index_dim else 0
        return k.row_bytes(self.rank + self.rope_dim) + index


@dataclass(frozen=True)
class Compressed(Layer):
    """DeepSeek V4: a window of `window` tokens, and one summary for every `rate` tokens before; keys are the values.

    index_dim: a further key a summary, for the index that picks among them. One KV head, whole on every GPU.
    """

    head_dim: int
    window: int
    rate: int
    index_dim: int = 0
    kind = "compressed"

    def kept(self, seq_len: int) -> int:
        return min(seq_len, self.window)

    def token_bytes(self, k: Format, v: Format, tp: int = 1) -> int:
        return k.row_bytes(self.head_dim)

    def kv_bytes(self, seq_len: int, k: Format, v: Format, tp: int = 1, block: int = 1) -> int:
        index = k.row_bytes(self.index_dim) if self.index_dim else 0
        summaries = round_up(seq_len // self.rate, block) * (k.row_bytes(self.head_dim) + index)
        return super().kv_bytes(seq_len, k, v, tp, block) + summaries


@dataclass(frozen=True)
class State(Layer):
    """A state of fixed size in fp32: `parts` are (units, values a unit); units (heads, channels) divide among GPUs."""

    parts: tuple[tuple[int, int], ...]
    kind = "state"

    def state_bytes(self, tp: int = 1) -> int:
        return 4 * sum(heads_per_gpu(units, tp) * values for units, values in self.parts)


@dataclass(frozen=True)
class Both(Layer):
    """Attention and a state in one layer: their bytes add."""

    attention: Layer
    state: State = field(default=State(()))
    kind = "both"

    def kept(self, seq_len: int) -> int:
        return self.attention.kept(seq_len)

    def token_bytes(self, k: Format, v: Format, tp: int = 1) -> int:
        return self.attention.token_bytes(k, v, tp)

    def state_bytes(self, tp: int = 1) -> int:
        return self.state.state_bytes(tp)


def round_up(n: int, block: int) -> int:
    """The smallest multiple of `block` that holds n."""
    return -(-n // block) * block


def heads_per_gpu(heads: int, tp: int) -> int:
    """How many of `heads` one of `tp` GPUs holds: heads / tp, and never less than one (then they are replicated)."""
    if tp <= heads and heads % tp == 0:
        return heads // tp
    if tp > heads and tp % heads == 0:
        return 1
    raise ConfigError(f"tensor_parallel={tp} cannot divide {heads} heads evenly, nor replicate them evenly")
