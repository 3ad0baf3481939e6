"""Memory against quality: what each variant holds for a text, and what it costs on it; which of them nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvlab.config import ModelConfig, check_int
from kvlab.quality import Quality
from kvlab.quality.result import Spread


@dataclass(frozen=True)
class Point:
    """One variant on one text. line: what it belongs to; name: which of that line.

    nbytes: held for the text by the same cache of an fp16 model. kl: nats a token. top1: share of tokens.
    """

    line: str
    name: str
    variant: str
    nbytes: int
    perplexity: float
    kl: float
    top1: float

    @property
    def title(self) -> str:
        return f"{self.line}, {self.name}" if self.name else self.line


def fp16_bytes(quality: Quality, itemsize: int) -> int:
    """What the cache of `quality` would hold for a model in fp16, positions, scores and scales included.

    Numbers of the model's own type (`itemsize` bytes each) become 2 bytes: keys and values, but of a quantized cache
    the tail alone. Codes, scales, scores and positions stay.
    """
    by = quality.nbytes_by
    own = by["tail"] if "tail" in by else by["keys"] + by["values"] + by.get("sink_keys", 0)
    return own * 2 // itemsize + sum(by.values()) - own


def equal_window(config: ModelConfig, nbytes: int, sinks: int = 4, itemsize: int = 2) -> int:
    """The largest window for which a sliding cache with `sinks` sinks holds at most nbytes.

    Raises ValueError where not even one token beside the sinks would fit.
    """
    check_int("sinks", sinks, 0)
    window = nbytes // config.kv_bytes_per_token(itemsize) - sinks
    if window < 1:
        raise ValueError(f"{nbytes:,} bytes hold {window + sinks} tokens: no window is left beside {sinks} sinks")
    return window


def undominated(points: Iterable[Point], slack: float = 0.03) -> list[Point]:
    """The frontier: the points that no other beats in perplexity with as few bytes, fewest bytes first.

    slack: bytes that differ by less than this share count as equal, as those of caches made to be of equal size do.
    """
    points = list(points)
    beaten = {p for p in points for q in points if q.perplexity < p.perplexity and q.nbytes <= (1 + slack) * p.nbytes}
    return sorted((p for p in points if p not in beaten), key=lambda p: p.nbytes)


def verdict(a: str, b: str, ratio: Spread) -> str:
    """One sentence on perplexity(a) / perplexity(b), with its interval: better, worse, or not to be told apart."""
    said = f"the perplexity is {ratio.value:.3f} times as large (95% interval {ratio.low:.3f} to {ratio.high:.3f})"
    word = "better than" if ratio.high < 1 else "worse than" if ratio.low > 1 else "not to be told apart from"
    return f"On this text {a} is {word} {b}: {said}."


def points(results: Mapping[str, Quality], places: Mapping[str, tuple[str, str, str]], itemsize: int) -> list[Point]:
    """A Point for each result. places: {name of the result: (line, name on it, variant)}; itemsize: of the model."""
    found = []
    for key, r in results.items():
        found.append(Point(*places[key], fp16_bytes(r, itemsize), r.perplexity, r.mean_kl, r.top1))
    return found
