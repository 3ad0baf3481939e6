"""Quality: what evaluate() found for one cache, figures with their spread, and a table of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvlab.config import check_int


@dataclass(frozen=True)
class Spread:
    """A figure and the interval in which 95% of its bootstrap resamples lie."""

    value: float
    low: float
    high: float

    def __str__(self):
        digits = max(0, 3 - math.floor(math.log10(max(abs(self.value), 1e-3))))
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, eq=False)
class Quality:
    """One cache on one text of N tokens, or on B of them.

    nll:    (B, N - first) float64, nats: minus the log-probability of each token from position `first` on (1: all that
            are predicted). nll[b, i] is about the token at position first + i.
    kl:     the same shape, nats: KL(full || this) of the distributions behind each prediction.
    agree:  the same shape, bool: both find the same token likeliest.
    nbytes, nbytes_by, nbytes_in_use: the cache's, when it has seen all N tokens of B rows; None where it does not say.
    tokens, chunk: N, and how many of them were fed at once.
    """

    name: str
    nll: Tensor
    kl: Tensor
    agree: Tensor
    nbytes: int | None
    nbytes_by: dict[str, int]
    nbytes_in_use: int | None
    tokens: int
    chunk: int
    first: int = 1

    @property
    def perplexity(self) -> float:
        """exp of the mean nll: as unsure as a choice among that many equally likely tokens."""
        return math.exp(min(self.nll.mean().item(), 700.0))

    @property
    def mean_kl(self) -> float:
        return self.kl.mean().item()

    @property
    def top1(self) -> float:
        """Share of predictions whose likeliest token is the full cache's."""
        return self.agree.double().mean().item()

    @property
    def bytes_per_token(self) -> float | None:
        """nbytes, divided by all tokens of the text: a window's falls as the text grows."""
        return None if self.nbytes is None else self.nbytes / (self.nll.shape[0] * self.tokens)

    def after(self, n: int) -> Quality:
        """The same, but of predictions of tokens at position n and later alone: after(window) leaves out what still
        fits in the window. Bytes stay those of the whole text. ValueError if no prediction is left."""
        check_int("n", n, 0)
        if n >= self.tokens:
            raise ValueError(f"after({n}): the text has {self.tokens} tokens, at positions 0 to {self.tokens - 1}")
        skip = max(0, n - self.first)
        cut = {name: getattr(self, name)[:, skip:] for name in ("nll", "kl", "agree")}
        return replace(self, first=self.first + skip, **cut)

    def spread(self, block: int = 32, resamples: int = 1000, seed: int = 0) -> Spread:
        """The perplexity with a 95% interval, from a bootstrap over blocks of the text: see bootstrap()."""
        return bootstrap(self.nll, lambda mean: mean.clamp(max=700).exp(), block, resamples, seed)

    def versus(self, other: Quality, block: int = 32, resamples: int = 1000, seed: int = 0) -> Spread:
        """This perplexity divided by another's on the same text, with a 95% interval. Both are resampled together, so
        that what makes a block hard for both cancels: far narrower than two spreads side by side."""
        if (self.first, self.nll.shape) != (other.first, other.nll.shape):
            raise ValueError(
                f"{self.name} has {tuple(self.nll.shape)} predictions from position {self.first} on, {other.name} "
                f"{tuple(other.nll.shape)} from {other.first} on: compare the same ones, with after()"
            )
        return bootstrap(self.nll - other.nll, lambda mean: mean.clamp(max=700).exp(), block, resamples, seed)

    def over_text(self, block: int = 64, of: str = "perplexity") -> tuple[list[int], list[float]]:
        """Perplexity, KL or top-1 agreement of each run of `block` predicted tokens, over all rows, to be drawn against
        the position: (middle of each run, values). of: "perplexity", "kl" or "top1"."""
        check_int("block", block)
        if of not in ("perplexity", "kl", "top1"):
            raise ValueError(f"of={of!r} must be 'perplexity', 'kl' or 'top1'")
        values = {"perplexity": self.nll, "kl": self.kl, "top1": self.agree.double()}[of]
        means = [part.mean().item() for part in values.split(block, 1)]
        middles = [min(start + block // 2, self.tokens - 1) for start in range(self.first, self.tokens, block)]
        return middles, [math.exp(min(mean, 700.0)) for mean in means] if of == "perplexity" else means

    def __str__(self):
        return table({self.name: self})


def bootstrap(values: Tensor, statistic=None, block: int = 32, resamples: int = 1000, seed: int = 0) -> Spread:
    """statistic(mean of values) with a 95% interval. values: (B, M), in the order of the text.

    Neighbouring tokens are hard or easy together, so whole blocks of `block` of them are drawn with replacement (block
    bootstrap, Kuensch 1989), from all rows; an eighth of a short text at a time. The interval speaks of texts like
    this one, nothing wider.
    """
    statistic = statistic or (lambda mean: mean)
    if block < 1 or resamples < 2:
        raise ValueError(f"block={block} and resamples={resamples} must be at least 1 and 2")
    block = max(1, min(block, values.numel() // 8))
    parts = [part for row in values.double() for part in row.split(block)]
    sums = torch.stack([part.sum() for part in parts])
    sizes = torch.tensor([len(part) for part in parts], dtype=torch.float64)
    draw = torch.randint(len(parts), (resamples, len(parts)), generator=torch.Generator().manual_seed(seed))
    means = statistic(sums[draw].sum(1) / sizes[draw].sum(1))
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Spread(float(statistic(values.double().mean())), low, high)


def table(results: Mapping[str, Quality]) -> str:
    """A table in plain text: a line per cache, its bytes, perplexity with its interval, KL and agreement."""
    rows = [("cache", "bytes", "bytes/token", "perplexity", "95% interval", "KL (nats)", "top-1")]
    for name, r in results.items():
        s = r.spread()
        size = ("-", "-") if r.nbytes is None else (f"{r.nbytes:,}", f"{r.bytes_per_token:,.0f}")
        rows.append(
            (str(name), *size, f"{s.value:.2f}", f"{s.low:.2f} to {s.high:.2f}", f"{r.mean_kl:.4f}", f"{r.top1:.1%}")
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows]
    return "\n".join((lines[0], "-" * len(lines[0]), *lines[1:]))


def wilson(successes: int, trials: int) -> Spread:
    """A share of few trials with its 95% interval (Wilson 1927): not empty at 0 and at 1, as a bootstrap is."""
    z, p = 1.96, successes / trials
    middle = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return Spread(p, max(0.0, middle - half), min(1.0, middle + half))
