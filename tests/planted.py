"""Small caches as a reader would write them, right, and with one mistake planted in each: check_cache must name it.

PLANTED: name -> (class, expect, words that the message must contain).
"""

from __future__ import annotations

import torch

from kvlab.attention import View, rope, rope_angles, rope_frequencies
from kvlab.caches import KVCache

FREQ = rope_frequencies(8)


class Reader(KVCache):
    """Right: keeps everything, by torch.cat."""

    def __init__(self, batch_size=1, max_length=None):
        super().__init__(batch_size, max_length)
        self.k, self.v, self.pos = {}, {}, {}

    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos))

    def keep(self, layer, k, v, pos):
        if layer in self.k:
            k, v = torch.cat((self.k[layer], k), 2), torch.cat((self.v[layer], v), 2)
            pos = torch.cat((self.pos[layer], pos), 1)
        self.k[layer], self.v[layer], self.pos[layer] = k, v, pos
        return k, v, pos

    def nbytes_by(self):
        return {"keys": sum(x.nbytes for x in self.k.values()), "values": sum(x.nbytes for x in self.v.values())}

    def _reorder(self, rows):
        for held in (self.k, self.v, self.pos):
            for layer in held:
                held[layer] = held[layer][rows]

    def _rewind(self, n):
        keep = torch.tensor([length - x for length, x in zip(self.lengths, n)])[:, None]
        for layer, pos in self.pos.items():
            self.pos[layer] = torch.where(pos < keep, pos, -1)


class Plain:
    """Right: an object with append alone."""

    def __init__(self):
        self.held = {}

    def append(self, layer, k, v, pos):
        if layer in self.held:
            a, b, c = self.held[layer]
            k, v, pos = torch.cat((a, k), 2), torch.cat((b, v), 2), torch.cat((c, pos), 1)
        self.held[layer] = k, v, pos
        return View(k, v, pos)


class Preallocated(Reader):
    """Right: buffers of max_length slots; slot = position, padding is not stored."""

    def append(self, layer, k, v, pos):
        B, n, T, D = k.shape
        if layer not in self.k:
            self.k[layer], self.v[layer] = (x.new_zeros(B, n, self.max_length, D) for x in (k, v))
            self.pos[layer] = torch.full((B, self.max_length), -1)
        rows, columns = torch.nonzero(pos >= 0, as_tuple=True)
        self.write(layer, rows, pos[rows, columns], columns, k, v)
        return self.view(layer)

    def write(self, layer, rows, slots, columns, k, v):
        self.k[layer][rows, :, slots] = k[rows, :, columns]
        self.v[layer][rows, :, slots] = v[rows, :, columns]
        self.pos[layer][rows, slots] = slots

    def view(self, layer):
        return View(self.k[layer], self.v[layer], self.pos[layer])


class Window(Reader):
    """Right: the last W tokens of each row (rows of one length), by cat and slice."""

    window, keeps = 5, 5

    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        rank = pos.argsort(1)  # padding (-1) first, newest last
        last = rank[:, max(0, rank.shape[1] - self.keeps) :]
        pick = last[:, None, :, None]
        self.k[layer] = k.gather(2, pick.expand(-1, k.shape[1], -1, k.shape[3]))
        self.v[layer] = v.gather(2, pick.expand(-1, v.shape[1], -1, v.shape[3]))
        self.pos[layer] = pos.gather(1, last)
        return View(k, v, pos, self.shown)

    @property
    def shown(self):
        return self.window

    _rewind = KVCache._rewind


PLANTED = {}


def plant(*words, expect="exact", name=None):
    def add(cls):
        PLANTED[name or cls.__name__] = (cls, expect, words)
        return cls

    return add


# --- positions --------------------------------------------------------------------------------------------------


@plant("Positions are shifted by -1", "all keys", "view.pos")
class ShiftedDown(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, pos - 1)


@plant("Positions are shifted by +1", "all keys")
class ShiftedUp(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, torch.where(pos >= 0, pos + 1, pos))


@plant("Positions are shifted by +1", "the key of position 6", "misses its own key")
class ShiftedAfterPrefill(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos if pos.shape[1] > 1 else pos + 1))


@plant("loses count", "[6]", "[7]", "next_positions")
class CountsTwice(Reader):
    def advance(self, pos):
        super().advance(pos)
        self.lengths = [n + (n > 1) for n in self.lengths]


@plant("loses count", "[6]", "[0]", "super().advance(pos)")
class ForgetsToAdvance(Reader):
    def advance(self, pos):
        pass


@plant("Positions are wrong in view.pos", "the key of position 1 is called 2, 2 is called 4", "all logits agree")
class Doubled(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, pos * 2)


@plant("The mask sees the future", "labels that key 0")
class Reversed(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, pos.flip(1))


# --- what is missing, or there twice ----------------------------------------------------------------------------


@plant("The first token is lost", "position 0")
class FirstTokenLost(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k[:, :, 1:], v[:, :, 1:], pos[:, 1:])


@plant("The last token is missing", "own key")
class OwnKeyMissing(Reader):
    def append(self, layer, k, v, pos):
        old = (self.k[layer], self.v[layer], self.pos[layer]) if layer in self.k else (k, v, pos)
        self.keep(layer, k, v, pos)
        return View(*old)


@plant("Earlier tokens are missing", "positions 0 to 5")
class KeepsNothing(Reader):
    def append(self, layer, k, v, pos):
        return View(k, v, pos)


@plant("Tokens are missing", "several tokens", "chunks of several tokens")
class LastOfChunkOnly(Reader):
    def append(self, layer, k, v, pos):
        if layer in self.k:
            k, v, pos = k[:, :, -1:], v[:, :, -1:], pos[:, -1:]
        return View(*self.keep(layer, k, v, pos))


@plant("Tokens are stored twice")
class StoredTwice(Reader):
    def append(self, layer, k, v, pos):
        new = self.keep(layer, k, v, pos)
        return View(*new) if len(self.k) < 2 else View(*self.keep(layer, k, v, pos))


@plant("Empty slots are visible")
class EmptySlots(Preallocated):
    def view(self, layer):
        S = self.max_length
        return View(self.k[layer], self.v[layer], torch.arange(S).expand(len(self.pos[layer]), S), all_visible=True)


@plant("Empty slots are visible", "moved on by every layer", "layer 1")
class CountsEveryLayer(Preallocated):
    n = 0

    def append(self, layer, k, v, pos):
        B, n, T, D = k.shape
        if layer not in self.k:
            self.k[layer], self.v[layer] = (x.new_zeros(B, n, 4 * self.max_length, D) for x in (k, v))
        new = slice(self.n, self.n + T)
        self.k[layer][:, :, new], self.v[layer][:, :, new] = k, v
        self.n += T
        S = self.n
        return View(self.k[layer][:, :, :S], self.v[layer][:, :, :S], torch.arange(S).expand(B, S))


@plant("The cache forgets", "only the last 8 keys", "0 to 3", "expect='window'")
class ForgetsQuietly(Window):
    window = None
    keeps = 7

    def append(self, layer, k, v, pos):
        view = super().append(layer, k, v, pos)
        return View(view.k, view.v, view.pos)


# --- contents ---------------------------------------------------------------------------------------------------


@plant("Stale values", "at position 6 is that of position 5", "all logits agree")
class StaleValue(Reader):
    def append(self, layer, k, v, pos):
        before = self.v[layer][:, :, -1:] if layer in self.v else None
        k, v, pos = self.keep(layer, k, v, pos)
        if before is not None and v.shape[2] == before.shape[2] + self.lengths[0]:
            v = torch.cat((v[:, :, :-1], before), 2)
        return View(k, v, pos)


@plant("Stale keys")
class StaleKey(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(torch.cat((k[:, :, :1], k[:, :, :-1]), 2), v, pos)


@plant("key at position 1 is not rotated", "all logits agree")
class NotRotated(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, rope(k, rope_angles(-pos.clamp(min=0), FREQ, k.dtype)), v, pos)


@plant("key at position 1 has been rotated twice", "all logits agree")
class RotatedTwice(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, rope(k, rope_angles(pos.clamp(min=0), FREQ, k.dtype)), v, pos)


@plant("value at position 1 has been rotated", "never values")
class ValuesRotated(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k, rope(v, rope_angles(pos.clamp(min=0), FREQ, v.dtype)), pos)


@plant("torch.float32", "torch.float64", "dtype=k.dtype")
class Float32Inside(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k.float(), v.float(), pos)
        return View(k.double(), v.double(), pos)


@plant("torch.float16", "keys have been through")
class HalfKeys(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k.half().to(k.dtype), v, pos)


@plant("The keys are rounded", "pass a tolerance")
class RoundedKeys(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, (k * 8).round() / 8, v, pos)


@plant("none that append was given", "values")
class ValuesScaled(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k, v * 2, pos)


@plant("Layers are mixed up", "layer 0")
class OneStoreForAllLayers(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(0, k, v, pos))


@plant("Layers are mixed up")
class LayerZeroEverywhere(Reader):
    def append(self, layer, k, v, pos):
        view = super().append(layer, k, v, pos)
        return View(self.k[0], self.v[0], view.pos)


@plant("Rows are mixed up", "row 0 is shown keys and values of row 1")
class RowsFlipped(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k.flip(0), v.flip(0), pos)


@plant("Rows are mixed up", "row 1 is shown keys and values of row 0")
class OneRowForAll(Preallocated):
    def view(self, layer):
        view = super().view(layer)
        return View(view.k[:1].expand_as(view.k), view.v[:1].expand_as(view.v), view.pos)


@plant("Heads are mixed up", "keys and values", "KV heads [1, 0]")
class HeadsFlipped(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k.flip(1), v.flip(1), pos)


@plant("Heads are mixed up", "repeat_interleave")
class HeadsRepeated(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), pos)


# --- mask -------------------------------------------------------------------------------------------------------


@plant("The mask sees the future", "query 0 sees the key of position 1", "all_visible", "all logits agree")
class AllVisible(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos), all_visible=True)


@plant("The mask sees the future", "in a chunk on a warm cache")
class NoMaskWhenWarm(Reader):
    def append(self, layer, k, v, pos):
        warm = layer in self.k
        return View(*self.keep(layer, k, v, pos), all_visible=warm)


@plant("The mask sees the future", "the mask follows view.pos")
class AllPositionsZero(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, torch.zeros_like(pos))


@plant("Padding is attended", "padded at the left")
class CountsColumns(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v, torch.arange(pos.shape[1]).expand_as(pos))


@plant("Padding is attended", "all_visible")
class PaddingVisible(Reader):
    def append(self, layer, k, v, pos):
        single = pos.shape[1] == 1
        return View(*self.keep(layer, k, v, pos), all_visible=single)


@plant("scale")
class OtherScale(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos), scale=1.0)


@plant("The cache forgets", "window=4", "expect='window'")
class SaysWindow(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos), window=4)


# --- state and bytes --------------------------------------------------------------------------------------------


@plant("State is kept between generations", "attribute of the class ClassAttribute", "`store`")
class ClassAttribute(Plain):
    store = {}

    def __init__(self):
        self.held = self.store


_shared = {}


@plant("State is kept between generations", "earlier text")
class GlobalStore(Plain):
    def __init__(self):
        self.held = _shared


class Kept(Reader):
    one = None


@plant("A new cache is not empty", "lengths")
class SameObject(Reader):
    def __new__(cls, *args, **kwargs):
        if "made" not in vars(Kept):
            Kept.made = Reader(*args, **kwargs)
        return Kept.made


@plant("Memory grows without bound")
class KeepsEveryView(Reader):
    def append(self, layer, k, v, pos):
        self.views = getattr(self, "views", [])
        self.views.append(super().append(layer, k, v, pos))
        return self.views[-1]


@plant("nbytes is wrong", "0.125 times")
class CountsElements(Reader):
    def nbytes_by(self):
        return {"keys": sum(x.numel() * 2 for x in self.k.values())}


@plant("Memory does not slide", expect="window")
class OnlyTheMaskSlides(Reader):
    window = 4

    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos), window=4)


@plant("The window is too narrow", "only the last 4 keys", expect="window")
class WindowTooNarrow(Window):
    keeps = 3


@plant("The window is too wide", "counts the query's own", expect="window")
class WindowTooWide(Window):
    keeps = 9
    shown = 6


@plant("needs to know the window", expect="window")
class UnknownWindow(Reader):
    pass


# --- operations -------------------------------------------------------------------------------------------------


@plant("fork", "The parent is changed by its fork")
class SharedFork(Preallocated):
    def fork(self):
        twin = type(self)(self.batch_size, self.max_length)
        twin.k, twin.v, twin.pos, twin.lengths = self.k, self.v, self.pos, list(self.lengths)
        return twin


@plant("fork returns the cache itself")
class ForkIsSelf(Reader):
    def fork(self):
        return self


@plant("fork, the copy", "Earlier tokens are missing")
class EmptyFork(Reader):
    def fork(self):
        twin = type(self)(self.batch_size, self.max_length)
        twin.lengths = list(self.lengths)
        return twin


@plant("rewind(4)", "Tokens that were taken back are still there")
class RewindDoesNothing(Reader):
    def _rewind(self, n):
        pass


@plant("rewind(4)", "loses count")
class RewindKeepsCounting(Reader):
    def rewind(self, n):
        pass


@plant("reorder([2, 0, 0])", "Rows are mixed up")
class ReorderDoesNothing(Reader):
    def _reorder(self, rows):
        pass


@plant("reorder([2, 0, 0])", "Rows are mixed up", "is shown values of row")
class ReorderForgetsValues(Reader):
    def _reorder(self, rows):
        for held in (self.k, self.pos):
            for layer in held:
                held[layer] = held[layer][rows]


@plant("reorder", "raises", "RuntimeError: boom")
class ReorderRaises(Reader):
    def _reorder(self, rows):
        raise RuntimeError("boom")


# --- form, and exceptions ---------------------------------------------------------------------------------------


@plant("append returns nothing", "return View(k, v, pos)")
class ReturnsNone(Reader):
    def append(self, layer, k, v, pos):
        self.keep(layer, k, v, pos)


@plant("append returns a tuple", "return View(k, v, pos)")
class ReturnsTuple(Reader):
    def append(self, layer, k, v, pos):
        return self.keep(layer, k, v, pos)


@plant("View.pos has shape (1, 1)", "7 keys in view")
class PosOfNewOnly(Reader):
    def append(self, layer, k, v, pos):
        return View(*self.keep(layer, k, v, pos)[:2], pos)


@plant("6 keys in view", "4 heads in view and append was given 2", "along dimension 2")
class JoinsHeadsOfOneStore(Plain):
    def append(self, layer, k, v, pos):
        if 0 in self.held:
            a, b, c = self.held[0]
            k, v, pos = torch.cat((a, k), 1), torch.cat((b, v), 1), torch.cat((c, pos), 1)
        self.held[0] = k, v, pos
        return View(k, v, pos)


@plant("Feeding 1 token after 6 raises RuntimeError: Sizes of tensors must match", "in append", "torch.cat")
class JoinsHeads(Reader):
    def append(self, layer, k, v, pos):
        if layer in self.k:
            k, v = torch.cat((self.k[layer], k), 1), torch.cat((self.v[layer], v), 1)
            pos = torch.cat((self.pos[layer], pos), 1)
        self.k[layer], self.v[layer], self.pos[layer] = k, v, pos
        return View(k, v, pos)


@plant("View.k has shape", "must be (B, n_kv, S, D)")
class HeadsLast(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k.transpose(2, 3), v.transpose(2, 3), pos)


@plant("The dtype changes", "View.k is torch.float32", "torch.float64")
class Float32View(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k.float(), v.float(), pos)


@plant("View.pos is torch.float64", "integer")
class FloatPositions(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, k, v, pos.double())


@plant("NaN", "Use zeros, not empty")
class NaNSlots(Preallocated):
    def append(self, layer, k, v, pos):
        if layer not in self.k:
            super().append(layer, k, v, pos)
            self.k[layer][self.pos[layer][:, None, :, None].expand_as(self.k[layer]) < 0] = float("nan")
        return super().append(layer, k, v, pos)


@plant("must hold the same tokens")
class ValuesShort(Reader):
    def append(self, layer, k, v, pos):
        k, v, pos = self.keep(layer, k, v, pos)
        return View(k, v[:, :, -1:], pos)


@plant("KeyError: 7", "in append", "self.table[7]", "Feeding 6 tokens after 0")
class RaisesKeyError(Reader):
    table = {}

    def append(self, layer, k, v, pos):
        return self.table[7]


@plant("super().__init__(batch_size, max_length)")
class ForgetsInit(Reader):
    def __init__(self, batch_size, max_length):
        self.k, self.v, self.pos = {}, {}, {}


@plant("The factory fails", "TypeError", "window")
class NeedsMore(Reader):
    def __init__(self, batch_size, max_length, window):
        super().__init__(batch_size)


@plant("has no append")
class NoAppend:
    pass


@plant("after 11 raises", "IndexError")
class OneSlotShort(Preallocated):
    def __init__(self, batch_size=1, max_length=None):
        super().__init__(batch_size, max_length - 1)


# --- lossy: within any tolerance, and still wrong in structure --------------------------------------------------


@plant("the logits are within", "Positions are shifted by -1", expect=1e9)
class LossyShifted(ShiftedDown):
    def append(self, layer, k, v, pos):
        return super().append(layer, (k * 4).round() / 4, v, pos)


@plant("the logits are within", "Rows are mixed up", expect=1e9)
class LossyRows(RowsFlipped):
    def append(self, layer, k, v, pos):
        return super().append(layer, (k * 4).round() / 4, v, pos)


@plant("the rounding alone costs more than the tolerance", expect=1e-4)
class LossyTooMuch(Reader):
    def append(self, layer, k, v, pos):
        return super().append(layer, (k * 16).round() / 16, v, pos)
