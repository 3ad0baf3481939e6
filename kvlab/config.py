"""ModelConfig: the shape of a GPT, in Hugging Face's field names. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-style decoder. Fields carry the names of Hugging Face's config.json.

    num_key_value_heads: None means one per query head (MHA); 1 is MQA; a divisor of num_attention_heads is GQA.
    head_dim:            None means hidden_size // num_attention_heads; some models state another value.
    intermediate_size:   None means 8/3 of hidden_size, rounded up to a multiple of 32 (SwiGLU's usual width).
    sliding_window:      a query sees this many keys, its own included; applies to layers of type "sliding_attention".
    layer_types:         one of "full_attention" or "sliding_attention" per layer; None means all alike
                         (sliding where sliding_window is set, full otherwise).
    kv_owner:            per layer, the layer whose keys and values it uses; None means its own. A layer that follows
                         another has no key and value projections and stores nothing (Gemma 3n, CLA arXiv 2405.12981):
                         with kv_owner=(0, 0, 2, 2) layers 1 and 3 follow 0 and 2, and a cache holds half as much.
    kv_lora_rank:        numbers in the latent that stands for a token's keys and values; None means ordinary attention.
                         It needs qk_nope_head_dim and qk_rope_head_dim (a head's key, without and with a position),
                         v_head_dim, and q_lora_rank (None: queries straight from the hidden state). head_dim is then
                         qk_rope_head_dim, the part that turns. (DeepSeek-V2, arXiv 2405.04434; see kvlab.mla)
    attention_bias:      biases on q, k, v and o (Llama's switch). qkv_bias: on q, k and v alone (Qwen2).
    rope_scaling:        None, {"rope_type": "linear", "factor": ...} or {"rope_type": "llama3", ...}.

    Raises ValueError for sizes that cannot be a model, naming the field and its value.
    """

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    kv_owner: tuple[int, ...] | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self):
        def fill(name, value):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name))
        check_latent(self)
        fill("num_key_value_heads", self.num_attention_heads)
        check_int("num_key_value_heads", self.num_key_value_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}: each KV head serves an equal group of query heads"
            )
        fill("head_dim", self.qk_rope_head_dim)
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "state head_dim to give heads another width"
            )
        fill("head_dim", self.hidden_size // self.num_attention_heads)
        check_int("head_dim", self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE turns pairs of channels")
        fill("intermediate_size", -(-self.hidden_size * 8 // 3 // 32) * 32)
        check_int("intermediate_size", self.intermediate_size)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a positive number")
        if self.sliding_window is not None:
            check_int("sliding_window", self.sliding_window)
        default = "full_attention" if self.sliding_window is None else "sliding_attention"
        fill("layer_types", (default,) * self.num_hidden_layers)
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers={self.num_hidden_layers}"
            )
        for kind in self.layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ValueError(f"layer type {kind!r} is neither 'full_attention' nor 'sliding_attention'")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has 'sliding_attention', so sliding_window must say how many keys it sees")
        fill("kv_owner", range(self.num_hidden_layers))
        object.__setattr__(self, "kv_owner", check_owners(self.kv_owner, self.num_hidden_layers))
        check_one_type(self.kv_owner, self.layer_types)

    def window(self, layer: int) -> int | None:
        """How many keys a query of this layer sees, its own included; None means all."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @property
    def group_size(self) -> int:
        """Query heads that share one stored head: 1 for MHA, num_attention_heads for MQA and for a latent."""
        return self.num_attention_heads // self.kv_shape[0]

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """What a cache stores of a token in a layer: (heads, numbers in a key, numbers in a value).

        With kv_lora_rank (1, kv_lora_rank, qk_rope_head_dim): the latent as the key, the turned part as the value.
        """
        if self.kv_lora_rank is not None:
            return 1, self.kv_lora_rank, self.qk_rope_head_dim
        return self.num_key_value_heads, self.head_dim, self.head_dim

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers that store keys and values of their own: all, unless kv_owner says otherwise."""
        return tuple(sorted(set(self.kv_owner)))

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that one token adds in all layers, at `itemsize` bytes a number (2 = fp16)."""
        heads, key, value = self.kv_shape
        return len(self.kv_layers) * heads * (key + value) * itemsize

    def with_(self, **changes) -> ModelConfig:
        """A copy with some fields changed; derived fields that you do not name are kept as they are."""
        unknown = set(changes) - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"ModelConfig has no field {', '.join(sorted(unknown))}")
        if self.kv_owner == tuple(range(self.num_hidden_layers)):
            changes.setdefault("kv_owner", None)  # every layer its own: that holds for any number of layers
        return replace(self, **changes)


def check_latent(c: ModelConfig) -> None:
    """The sizes of latent attention: all of them or none, and nothing beside them that it has no place for."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if c.kv_lora_rank is None:
        for name in (*names, "q_lora_rank"):
            if (value := getattr(c, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} is a size of latent attention: it needs kv_lora_rank, which is None"
                )
        return
    for name in names:
        if getattr(c, name) is None:
            raise ValueError(f"kv_lora_rank={c.kv_lora_rank!r} asks for latent attention, which needs {name} too")
        check_int(name, getattr(c, name))
    if c.q_lora_rank is not None:
        check_int("q_lora_rank", c.q_lora_rank)
    if c.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim={c.qk_rope_head_dim} must be even: RoPE turns pairs of channels")
    for name, right in (("num_key_value_heads", c.num_attention_heads), ("head_dim", c.qk_rope_head_dim)):
        if getattr(c, name) not in (None, right):
            raise ValueError(
                f"{name}={getattr(c, name)!r} with kv_lora_rank={c.kv_lora_rank}: all heads share one latent, so leave "
                f"{name} out (or state {right})"
            )
    if c.qkv_bias:
        raise ValueError(f"qkv_bias=True with kv_lora_rank={c.kv_lora_rank}: latent attention has only attention_bias")


def check_owners(owners, layers: int | None = None, name: str = "kv_owner") -> tuple[int, ...]:
    """A layer map as a tuple. ValueError or TypeError unless it names for each layer (of `layers`, if known) the layer
    itself or an earlier one that uses its own keys and values."""
    if isinstance(owners, str) or not hasattr(owners, "__iter__"):
        raise TypeError(f"{name}={owners!r} must name a layer for each layer, such as (0, 0, 2, 2)")
    owners = tuple(owners)
    if layers is not None and len(owners) != layers:
        raise ValueError(f"{name} names {len(owners)} layers, the model has {layers}")
    for layer, owner in enumerate(owners):
        check_int(f"{name} of layer {layer}", owner, 0)
        if owner > layer:
            raise ValueError(f"{name}: layer {layer} cannot use the keys of layer {owner}, which comes after it")
        if owners[owner] != owner:
            raise ValueError(
                f"{name}: layer {layer} follows layer {owner}, which follows {owners[owner]}: name that one"
            )
    return owners


def check_one_type(owners: tuple[int, ...], layer_types: tuple[str, ...]) -> None:
    """ValueError where a layer follows one of another type."""
    for layer, owner in enumerate(owners):
        if layer_types[owner] != layer_types[layer]:
            raise ValueError(
                f"kv_owner: layer {layer} is of type {layer_types[layer]!r} and follows layer {owner}, of type "
                f"{layer_types[owner]!r}; keys are shared among layers of one type"
            )


def check_int(name: str, value, least: int = 1) -> None:
    """Raises TypeError or ValueError, naming the value, unless it is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
