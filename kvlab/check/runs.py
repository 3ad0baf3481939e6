"""One run of check_cache: a fresh cache is fed a text in pieces, and every logit compared with the uncached model's."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlab.attention import View, rope, rope_angles
from kvlab.caches.adopt import adopt
from kvlab.caches.base import KVCache, NotOffered, RewindError
from kvlab.check.evidence import Rule, Token, spans
from kvlab.check.hypotheses import explain
from kvlab.check.spy import Found, Spy


@dataclass
class Report:
    """What check_cache found. ok: nothing is wrong. messages: what is wrong, the likeliest cause first."""

    name: str
    messages: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # not offered, not tested: no failures

    @property
    def ok(self) -> bool:
        return not self.messages

    def _lines(self):
        return [(m, line) for m, lines in zip("✗✓·", (self.messages, self.passed, self.notes)) for line in lines]

    def __str__(self) -> str:
        head = f"{self.name}: {'correct' if self.ok else 'not yet right'}"
        return "\n".join([head, *(f"  {mark} {line}" for mark, line in self._lines())])

    __repr__ = __str__

    def _repr_markdown_(self) -> str:
        def plain(text):
            return "".join("\\" + c if c in "\\`*_{}[]<>#|$" else c for c in text)

        head = f"**{plain(self.name)}: {'correct' if self.ok else 'not yet right'}**\n\n"
        return head + "".join(f"- {mark} {plain(line)}\n" for mark, line in self._lines())


class OnePass(KVCache):
    """The dense reference of a window: all tokens in one pass, masked; nothing is kept."""

    def __init__(self, batch_size: int, window: int, sinks: int):
        super().__init__(batch_size)
        self.window, self.sinks = window, sinks

    def append(self, layer, k, v, pos):
        return View(k, v, pos, self.window, self.sinks)


class TurnedSinks(OnePass):
    """The dense reference of StreamingLLM's sinks: everything is kept, and for the query at position q the sinks' keys
    are turned by max(0, q - (window + sinks - 1)), so that they stay in reach."""

    def __init__(self, batch_size: int, window: int, sinks: int, freq: Tensor):
        super().__init__(batch_size, window, sinks)
        self.freq, self.held = freq, {}

    def max_chunk(self, T):
        return 1

    def append(self, layer, k, v, pos):
        old = self.held.get(layer)
        k, v = (torch.cat((a, b), 2) for a, b in zip(old, (k, v))) if old else (k, v)
        self.held[layer] = k, v
        s = self.sinks
        angles = rope_angles((pos - (self.window + s - 1)).clamp(min=0), self.freq, k.dtype)
        k = torch.cat((rope(k[:, :, :s], angles), k[:, :, s:]), 2)
        return View(k, v, torch.arange(k.shape[2], device=k.device).expand(len(k), -1), self.window, s)


class Runs:
    def __init__(self, factory, model, expect):
        self.factory, self.model, self.expect = factory, model, expect
        self.report = Report(getattr(factory, "__name__", "cache"))
        self.tokens: list[Token] = []  # all that any cache was given, to recognise it where it should not be
        lossy = not isinstance(expect, str)
        eps = torch.finfo(model.dtype).eps
        self.rule = Rule(window=None, sinks=0, lossy=lossy, turned=False, close=1e4 * eps)
        self.latent = model.config.kv_lora_rank is not None  # its stored keys are not turned, its sinks' neither
        self.tolerance, self.texts, self.worst = (expect if lossy else None), 0, 0.0

    # --- one run -----

    def make(self, batch_size: int, max_length: int, repair: str | None = None) -> Spy:
        try:
            raw = self.factory(self.model, batch_size, max_length)
        except Exception as error:
            raise Found(
                f"The factory fails for batch_size={batch_size}, max_length={max_length}: {self.words(error)}"
            ) from error
        self.raw, self.report.name = raw, type(raw).__name__
        try:
            inner = adopt(raw, batch_size, max_length)
        except TypeError as error:
            raise Found(f"The factory must return a cache: {error}") from error
        if isinstance(raw, KVCache):
            if "_step" not in vars(raw):
                raise Found(
                    "__init__ does not call super().__init__(batch_size, max_length): KVCache keeps the lengths there"
                )
            if any(inner.lengths):
                raise Found(
                    f"A new cache is not empty: its lengths are {inner.lengths}. The factory must make a new one "
                    "each time"
                )
            if inner.batch_size != batch_size:
                raise Found(
                    f"The factory was asked for batch_size={batch_size} and its cache has {inner.batch_size} rows"
                )
        return Spy(inner, self.tokens, f"text {self.texts}", repair)

    def text(self, B: int, N: int) -> Tensor:
        """Ids (B, N): all different where the vocabulary allows, so that every key and value can be told apart."""
        self.texts += 1
        rng, V = torch.Generator().manual_seed(self.texts), self.model.config.vocab_size
        ids = torch.cat([torch.randperm(V, generator=rng) for _ in range(-(-B * N // V))])
        return ids[: B * N].view(B, N)

    def feed(self, spy: Spy, ids: Tensor, plan, got: dict, at: list[int]) -> None:
        """Feed the plan; fills got[row, position] with logits.

        plan: step by step, how many tokens each row gets; at: how many it has had, brought up to date here.
        """
        for lengths in plan:
            T, same = max(lengths), len(set(lengths)) == 1
            pos = torch.tensor([[-1] * (T - n) + list(range(s, s + n)) for s, n in zip(at, lengths)])
            asked = self.call(spy, "next_positions", T if same else lengths)
            if not isinstance(asked, Tensor) or not torch.equal(asked.cpu().long(), pos):
                flat = (lambda x: x[0].tolist()) if len(at) == 1 and T == 1 else Tensor.tolist
                say = flat(asked) if isinstance(asked, Tensor) and asked.dim() == 2 else repr(asked)
                raise Found(
                    f"The cache loses count: after {spans(at)} tokens the next position{'s are' if T > 1 else ' is'} "
                    f"{flat(pos)}, but next_positions says {say}. Look at lengths, and whether your advance calls "
                    "super().advance(pos)"
                )
            step = torch.zeros_like(pos)
            for b, (s, n) in enumerate(zip(at, lengths)):
                step[b, T - n :] = ids[b, s : s + n]
            try:
                logits = self.model(step, spy, None if same else pos)
            except Found:
                raise
            except Exception as error:
                fed = (
                    f"{T} token{'s' * (T > 1)} {'in each row' if len(at) > 1 else ''}".strip()
                    if same
                    else f"{lengths} tokens"
                )
                raise Found(f"Feeding {fed} after {at if len(at) > 1 else at[0]} raises {self.words(error)}") from error
            for b, n in enumerate(lengths):
                for i in range(n):
                    got[b, at[b] + i] = logits[b, T - n + i]
                at[b] += n

    def run(self, words: str, plan, repair: str | None = None, max_length: int | None = None) -> Spy | float:
        """A fresh cache, a new text, fed by plan, and judged."""
        B, N = len(plan[0]), max(map(sum, zip(*plan)))
        ids, got = self.text(B, N), {}
        spy = self.make(B, max_length or N, repair)
        try:
            self.feed(spy, ids, plan, got, [0] * B)
        except Found as found:
            self.judge(words, spy, ids, got, plan)  # wrong logits before it are the likelier cause
            raise Found(f"{words}: {found}") from found
        self.judge(words, spy, ids, got, plan)
        self.report.passed.append(f"{words} (max |diff| of a logit {self.worst:.1e})")
        return spy

    def reference(self, ids: Tensor) -> Tensor:
        """Logits (B, N, vocab) that are right."""
        w, s = self.rule.window, self.rule.sinks
        if w is None:
            return self.model(ids)
        return self.model(
            ids, TurnedSinks(len(ids), w, s, self.model.rope_freq) if self.rule.turned else OnePass(len(ids), w, s)
        )

    def compare(self, ids: Tensor, got: dict) -> tuple[dict, float]:
        """{(row, position): max |diff|} over the vocabulary, and the difference that counts as wrong."""
        right = self.reference(ids)
        diff = {at: float((x - right[at]).abs().max().nan_to_num(nan=float("inf"))) for at, x in got.items()}
        scale = max(1.0, float(right.abs().max()))
        return diff, self.tolerance or 1e4 * torch.finfo(right.dtype).eps * scale

    def judge(self, words: str, spy: Spy, ids: Tensor, got: dict, plan=None) -> None:
        if not got:
            return
        diff, limit = self.compare(ids, got)
        if max(diff.values()) > limit and self.rule.sinks and not self.rule.turned and not self.latent:
            self.rule.turned = True
            again, _ = self.compare(ids, got)
            self.rule.turned = max(again.values()) <= limit
            if self.rule.turned:
                self.report.notes.append("the sinks' keys are turned with the text, as in StreamingLLM")
                diff = again
        self.worst = max(diff.values())
        bad = {at: d for at, d in diff.items() if d > limit}
        if not bad and not self.rule.lossy:
            return
        finding = explain(spy.records, self.tokens, spy.run, self.rule, self.model, every=1 if bad else 3)
        if not bad:
            if finding:
                raise Found(f"{words}: the logits are within {limit:g}, and yet: {finding.text}")
            return
        row, p = next(iter(bad))
        seen = f"logits differ from the uncached model's by up to {self.worst:.2g}, first at position {p}"
        seen += f" of row {row}" if len(ids) > 1 else ""
        if finding is None:
            why = (
                f"Every key and value is in its place; the rounding alone costs more than the tolerance {limit:g}. "
                "Use more bits, smaller groups or a longer unrounded tail, or allow more."
                if self.rule.lossy
                else "Every view held what it should. Look for something that changes keys, values or positions after "
                "append has returned, or at observe and max_chunk."
            )
            raise Found(f"{words}: {seen}. {why}")
        more = self.try_repair(words, plan, finding.repair) if finding.repair and plan else ""
        raise Found(f"{words}: {seen}. {finding.text}{more}")

    def try_repair(self, words: str, plan, repair: str) -> str:
        """Replay with the suspected part of every view put right: was that all?"""
        B, N = len(plan[0]), max(map(sum, zip(*plan)))
        ids, got = self.text(B, N), {}
        try:
            self.feed(self.make(B, N, repair), ids, plan, got, [0] * B)
        except Found:
            return ""
        diff, limit = self.compare(ids, got)
        worst = max(diff.values())
        if worst <= limit:
            return f" With the right {repair} in place, all logits agree (max |diff| {worst:.1e})."
        return f" There is more: with the right {repair} in place, logits still differ by up to {worst:.2g}."

    # --- errors in words -----

    def call(self, spy, name: str, *args):
        try:
            return getattr(spy, name)(*args)
        except (NotOffered, RewindError):
            raise
        except Exception as error:
            raise Found(f"{name} raises {self.words(error)}") from error

    def words(self, error: Exception) -> str:
        """The exception, and the reader's own line that it came from."""
        methods = [
            getattr(f, "__code__", None) for c in type(getattr(self, "raw", None)).__mro__ for f in vars(c).values()
        ]
        own = {code.co_filename for code in [*methods, getattr(self.factory, "__code__", None)] if code is not None}
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f for f in frames if f.filename in own] or list(frames)
        f = mine[-1]
        line = (f.line or linecache.getline(f.filename, f.lineno)).strip()
        text = str(error).strip().splitlines()[0][:300] if str(error).strip() else "(no message)"
        return f"{type(error).__name__}: {text} (in {f.name}, line {f.lineno}: {line})"
