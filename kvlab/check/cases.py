"""What check_cache tries: single tokens, chunks, batches, padding, long texts, bytes; then fork, rewind and reorder."""

from __future__ import annotations

import torch

from kvlab.caches.adopt import Adopted
from kvlab.caches.base import KVCache, NotOffered, RewindError
from kvlab.check.runs import Runs
from kvlab.check.spy import Found
from kvlab.measure.watch import tensors_in

LARGEST_WINDOW = 512


class Cases(Runs):
    def everything(self) -> None:
        if self.expect == "window":
            self.read_window()
        for words, plan in self.plans():
            self.run(words, plan)
            self.no_shared_state()
        self.memory()
        for operation in (self.fork, self.rewind, self.reorder):
            name = operation.__name__
            try:
                operation()
            except (NotOffered, NotImplementedError):
                self.report.notes.append(f"{name}: not offered")

    def plans(self):
        """(words, plan); a plan lists, step by step, how many tokens each row is fed."""
        one, w, n = [1], self.rule.window, (self.rule.window or 0) + self.rule.sinks
        if w is None:
            yield "a prompt at once, then one token at a time", [[6]] + [one] * 6
            yield "chunks of several tokens on a warm cache", [[4], one, [5], [3], one, [2]]
            yield "two rows at once", [[5, 5], [1, 1], [3, 3], [1, 1]]
            yield "rows of unequal length, padded at the left", [[6, 3], [1, 1], [1, 0], [2, 1], [0, 2], [1, 1]]
            long = [[70, 61], [1, 1], [30, 33], [1, 1], [40, 40], *[[1, 1]] * 6, [9, 14], [1, 1]]
            yield "a longer text, in large and small pieces", long
            return
        singles = [[6], *[one] * (3 * n)] if n <= 16 else [[n - 2], *[one] * 6, [n], *[one] * 3, [n + 5], *[one] * 3]
        yield "one token at a time, past three windows", singles
        chunks = [[n + 3], one, [max(1, w - 1)], [2], [w], [w + 1], one, [2 * n], one]
        yield "chunks shorter and longer than the window", chunks
        yield "two rows at once", [[5, 5], [1, 1], [w + 2, w + 2], [1, 1], [3, 3]]
        ragged = [[6, 3], [1, 1], [1, 0], [w + 2, 2], [0, w + 1], [1, 1], [2, w], [1, 1]]
        yield "rows of unequal length, padded at the left", ragged

    def read_window(self) -> None:
        """Which window does the cache promise? Its attribute says, or its first view."""
        spy = self.make(1, 4)
        self.feed(spy, self.text(1, 4), [[4]], {}, [0])
        view = spy.records[0].view
        window = getattr(self.raw, "window", None) or view.window
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise Found(
                f"expect='window' needs to know the window, and it is {window!r}: return View(k, v, pos, window=W), or "
                "set self.window = W; W keys, the query's own included"
            )
        if window > LARGEST_WINDOW:
            raise Found(
                f"window={window} makes a slow check: let the factory use a small one (16, say); the rule is the same"
            )
        self.rule.window, self.rule.sinks = window, int(getattr(self.raw, "sinks", None) or view.sinks or 0)

    def no_shared_state(self) -> None:
        """Tensors in a class attribute belong to every cache of that class."""
        for cls in type(self.raw).__mro__:
            for name, value in vars(cls).items():
                if isinstance(value, (dict, list, set, tuple, torch.Tensor)) and any(True for _ in tensors_in(value)):
                    raise Found(
                        f"State is kept between generations: `{name}` is an attribute of the class {cls.__name__} and "
                        "holds tensors, so every cache shares it and a new text meets an old one. Make it in "
                        f"__init__: self.{name} = ..."
                    )

    # --- bytes -----

    def held(self, kinds=None) -> int:
        """Bytes of the storages that the cache holds, the model's left out."""
        storages = {}
        own = {t.untyped_storage()._cdata for t in self.model.parameters()} | {
            self.model.rope_freq.untyped_storage()._cdata
        }
        for t in tensors_in(self.raw):
            storage = t.untyped_storage()
            if storage._cdata not in own and (kinds is None or t.dtype in kinds):
                storages[storage._cdata] = storage.nbytes()
        return sum(storages.values())

    def memory(self) -> None:
        w, config = self.rule.window, self.model.config
        first = 20 if w is None else w + self.rule.sinks + 4
        more = 20 if w is None else first
        spy = self.make(1, first + more)
        ids, at = self.text(1, first + more), [0]
        token = config.kv_bytes_per_token(torch.finfo(self.model.dtype).bits // 8)
        sizes = []
        for n in (first, more):
            self.feed(spy, ids, [[1]] * n if n <= 64 else [[n - 8], *[[1]] * 8], {}, at)
            spy.records.clear()
            sizes.append(self.held())
        growth = (sizes[1] - sizes[0]) / (more * token)
        seen = f"it held {sizes[0]:,} bytes after {first} tokens and {sizes[1]:,} after {first + more}"
        if w is None and growth > 3:
            raise Found(
                f"Memory grows without bound: {seen}, {growth:.1f} times what {more} tokens need. It keeps old tensors "
                "alive: look for a list that collects every view, and for slices of larger tensors (a view pins its "
                "whole storage: clone it)."
            )
        if w is not None and growth > 0.25:
            raise Found(
                f"Memory does not slide: {seen}, although the window is {w}. The mask forgets, the store does not: "
                "drop what has left the window (and clone the slice, or it pins the whole storage), or write into a "
                "ring of window + sinks slots."
            )
        self.nbytes()
        self.report.passed.append(f"memory: {sizes[1]:,} bytes after {first + more} tokens of {token:,} bytes each")
        times = sizes[1] / token / (first + more if w is None else w + self.rule.sinks)
        if times > 1.5:
            self.report.notes.append(
                f"memory: that is {times:.1f} times what these tokens need (heads repeated before they are stored, a "
                "second copy, or room kept in advance)"
            )

    def nbytes(self) -> None:
        """nbytes against the storages: indices (int64, bool) may be left out, numbers may not."""
        try:
            says = getattr(self.raw, "nbytes", None)
            says = says() if callable(says) else says
        except (NotOffered, NotImplementedError):
            says = None
        except Exception as error:
            raise Found(f"nbytes raises {self.words(error)}") from error
        if says is None:
            self.report.notes.append("nbytes: not offered")
            return
        kinds = {
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.uint8,
            torch.int8,
            torch.float8_e4m3fn,
        }
        low, high = self.held(kinds), self.held()
        if not isinstance(says, int) or not 0.9 * low <= says <= 1.1 * high:
            ratio = f", {says / low:.3g} times as many" if isinstance(says, (int, float)) and low else ""
            raise Found(
                f"nbytes is wrong: it says {says!r}, the cache holds {low:,} bytes of keys, values and scales{ratio}. "
                "Sum x.nbytes (elements times element_size) over keys and values of all layers."
            )

    # --- operations on rows -----

    def fork(self) -> None:
        spy = self.make(1, 64)  # more than is fed: parent and copy may draw on one pool
        ids, other = self.text(1, 16), self.text(1, 16)
        other[:, :6] = ids[:, :6]
        mine, theirs, at = {}, {}, [0]
        self.feed(spy, ids, [[6]], mine, at)
        twin = self.call(spy, "fork")
        if twin.inner is spy.inner or (isinstance(twin.inner, Adopted) and twin.inner.inner is spy.inner.inner):
            raise Found("fork returns the cache itself: it must return a second cache")
        at2 = list(at)
        try:
            self.feed(twin, other, [[2], [1]], theirs, at2)
            self.feed(spy, ids, [[1], [3]], mine, at)
            self.feed(twin, other, [[1], [2]], theirs, at2)
            self.feed(spy, ids, [[1]], mine, at)
        except Found as found:
            self.judge("fork, the parent", spy, ids, mine)
            self.judge("fork, the copy", twin, other, theirs)
            raise Found(f"fork: {found}") from found
        self.judge("fork, the parent", spy, ids, mine)
        self.judge("fork, the copy", twin, other, theirs)
        self.report.passed.append("fork: parent and copy go on independently")

    def rewind(self) -> None:
        rows = type(self.raw).rewind is KVCache.rewind if isinstance(self.raw, KVCache) else False
        fits = 9 if self.rule.window is None else max(2, min(9, self.rule.window + self.rule.sinks))
        for B, n in ((1, min(4, fits - 1)), (2, min(3, fits - 1)), *([(2, [1, min(3, fits - 1)])] if rows else [])):
            spy, at = self.make(B, fits + 9), [0] * B
            ids, other = self.text(B, fits + 9), self.text(B, fits + 9)
            self.feed(spy, ids, [[fits - 2] * B if fits > 2 else [1] * B, *[[1] * B] * (2 if fits > 2 else 1)], {}, at)
            try:
                self.call(spy, "rewind", n)
            except RewindError as error:
                if error.largest < 1:
                    self.report.notes.append(f"rewind: not possible after {at[0]} tokens ({error})")
                    return
                n = error.largest
                self.call(spy, "rewind", n)
            at = [a - x for a, x in zip(at, [n] * B if isinstance(n, int) else n)]
            for b, a in enumerate(at):
                other[b, :a] = ids[b, :a]
            got, plan = {}, [[1] * B, [3] * B, [1] * B]
            words = f"rewind({n}) after {fits} tokens, then others"
            try:
                self.feed(spy, other, plan, got, at)
            except Found as found:
                self.judge(words, spy, other, got)
                raise Found(f"{words}: {found}") from found
            self.judge(words, spy, other, got)
        self.report.passed.append("rewind: tokens taken back leave no trace")

    def reorder(self) -> None:
        order, got, start = [2, 0, 0], {}, [5, 3, 4]
        spy, at = self.make(3, 32), [0, 0, 0]
        ids, later = self.text(3, 16), self.text(3, 16)
        self.feed(spy, ids, [start, [1, 1, 1]], {}, at)
        self.call(spy, "reorder", order)
        at = [at[r] for r in order]
        for b, r in enumerate(order):
            later[b, : at[b]] = ids[r, : at[b]]
        words = f"reorder({order})"
        try:
            self.feed(spy, later, [[1, 1, 1], [2, 1, 2], [1, 1, 1]], got, at)
        except Found as found:
            self.judge(words, spy, later, got)
            raise Found(f"{words}: {found}") from found
        self.judge(words, spy, later, got)
        self.report.passed.append("reorder: rows go where they are sent, twice if asked")
