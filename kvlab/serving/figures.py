"""What serving a workload took: counts, and the ratios that are made of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvlab.config import ModelConfig
from kvlab.cost import Flops, forward_flops


@dataclass
class Figures:
    """Counts of requests, tokens, slots (one holds one token) and steps.

    steps:          the clock at the end. model_steps: those in which anything was computed; the others waited.
    finished:       requests that got all their tokens.
    peak_requests:  most that ran at once; request_steps: how many ran, summed over model steps.
    token_steps:    tokens of running requests in the cache; slot_steps: slots held; free_steps: slots not held; and
                    stranded_steps: free slots outside the largest gap. All summed over model steps. Where any free slot
                    serves anybody, none is stranded.
    failures:       allocations that found no range; gap_failures: those though enough slots were free, at most the
                    share most_free_at_failure of the memory.
    preemptions:    requests that had to give up their slots; recomputed: the tokens which that lost.
    computed:       tokens that went through the model, padding and recomputed ones included; logit_rows: rows of
                    logits that it gave.
    read:           tokens (padding included) whose keys and values attention must read.
    pairs:          queries times keys that attention computes, each pass as wide as its longest request.
    moved_tokens:   copied to a longer range. cached: prompt tokens found in shared blocks and not computed.
    emitted:        new tokens.
    waited:         steps from arrival to the first new token, summed over the finished requests.
    """

    name: str
    num_slots: int
    requests: int
    finished: int = 0
    steps: int = 0
    model_steps: int = 0
    peak_requests: int = 0
    request_steps: int = 0
    token_steps: int = 0
    slot_steps: int = 0
    free_steps: int = 0
    stranded_steps: int = 0
    failures: int = 0
    gap_failures: int = 0
    most_free_at_failure: float = 0.0
    preemptions: int = 0
    recomputed: int = 0
    computed: int = 0
    logit_rows: int = 0
    read: int = 0
    pairs: int = 0
    moved_tokens: int = 0
    cached: int = 0
    emitted: int = 0
    waited: int = 0

    @property
    def mean_requests(self) -> float:
        """Running at once, on average over model steps."""
        return self.request_steps / max(1, self.model_steps)

    @property
    def utilization(self) -> float:
        """Tokens over the slots held for them. Sharing can lift it above 1."""
        return self.token_steps / max(1, self.slot_steps)

    @property
    def memory_in_use(self) -> float:
        """Tokens over all slots there are, held or not."""
        return self.token_steps / max(1, self.num_slots * self.model_steps)

    @property
    def external_fragmentation(self) -> float:
        """Of the free slots, those outside the largest gap."""
        return self.stranded_steps / max(1, self.free_steps)

    @property
    def tokens_per_step(self) -> float:
        """New tokens of all requests in one model step: a throughput that no machine's speed changes."""
        return self.emitted / max(1, self.model_steps)

    @property
    def mean_wait(self) -> float:
        """Steps from arrival to the first new token, on average over the finished requests."""
        return self.waited / max(1, self.finished)

    def flops(self, config: ModelConfig) -> Flops:
        """FLOPs of all model steps on a model of this shape, masked pairs included, as the Engine takes them.
        ValueError for latent attention, which picks a cheaper form at each call: counts of tokens do not tell which."""
        if config.kv_lora_rank is not None:
            raise ValueError(f"kv_lora_rank={config.kv_lora_rank}: latent attention's FLOPs do not follow from Figures")
        token, logits = forward_flops(config, 1, 1, logits=0), forward_flops(config, 0, 0, logits=1)
        projections = self.computed * token.projections + self.logit_rows * logits.projections
        return Flops(projections, self.pairs * token.attention)

    def bytes_read(self, weights_bytes: int, bytes_per_token: float) -> float:
        """Bytes that all model steps read: the weights once a step, and keys and values. Over the memory's bandwidth it
        is the least time that decoding takes."""
        return self.model_steps * weights_bytes + self.read * bytes_per_token

    def to_dict(self) -> dict:
        shown = ("mean_requests", "mean_wait", "utilization", "memory_in_use", "external_fragmentation")
        shown += ("tokens_per_step",)
        return asdict(self) | {name: getattr(self, name) for name in shown}
