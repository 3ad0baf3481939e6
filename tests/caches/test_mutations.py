"""Planted bugs must fail the very assertions that the real caches pass: a check that cannot fail proves nothing."""

import pytest
import test_properties
import test_rollback
import torch
from cases import check_fork, check_prefix
from oracles import assert_equals_oracle, ids_for, in_chunks, rule_of, toy

import kvlab.model
from kvlab.attention import rope_angles, visible
from kvlab.caches import BlockPool, FullCache, GrowingCache, PagedCache, QuantizedCache, SlidingWindowCache, make_cache
from kvlab.caches import codecs as codecs_module
from kvlab.caches import paged as paged_module
from kvlab.caches.codecs import IntCodec
from kvlab.caches.row import Row

MODEL = toy(seed=7)
LENGTHS = [17, 11]
OPTIONS = {
    "sliding": {"window": 5, "sinks": 2},
    "quantized": {"group_size": 4, "residual_length": 3, "k_bits": 4, "v_bits": 4},
    "paged": {"block_size": 4},
}


def hold(kind: str, options: dict | None = None) -> None:
    """The assertion of the property tests, on one ragged text in four chunkings."""
    options = OPTIONS.get(kind, {}) if options is None else options
    for chunk in (17, 7, 3, 1):
        cache = make_cache(kind, MODEL, 2, 20, **options)
        assert_equals_oracle(MODEL, cache, ids_for(1, LENGTHS), in_chunks(LENGTHS, chunk), rule_of(kind, options))


TURNED = {"window": 5, "sinks": 2, "sinks_at": "cache"}
CHECKS = {
    **{kind: (lambda kind=kind: hold(kind)) for kind in ("growing", "full", "sliding", "quantized", "paged")},
    "turned sinks": lambda: hold("sliding", TURNED),
    "fork": lambda: check_fork(lambda: make_cache("paged", MODEL, 1, 40, block_size=4, num_blocks=20), MODEL),
    "prefix": lambda: check_prefix(MODEL),
    "neighbours": lambda: test_properties.test_a_row_that_went_wrong_does_not_poison_its_neighbours("paged"),
    **{f"rollback of {kind}": (lambda kind=kind: roll_back(kind)) for kind in ("growing", *OPTIONS, "turned sinks")},
}


def roll_back(kind: str) -> None:
    setup = ("sliding", TURNED) if kind == "turned sinks" else (kind, OPTIONS.get(kind, {}))
    for held in (6, 7, 8, 9, 11):
        test_rollback.test_as_before_the_call(setup, held, 1)


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_bug_the_check_passes(check):
    CHECKS[check]()


def after(cls, change):
    """The class's _write with its view changed."""
    write = cls._write

    def changed(self, layer, k, v, step):
        view = write(self, layer, k, v, step)
        return change(view, layer, step) or view

    return cls, "_write", changed


def forget_the_first(view, layer, step):
    view.pos = view.pos.clone()
    view.pos[view.pos == 0] = -1
    view.all_visible = False


def stale_value(view, layer, step):
    """The newest value is that of the token before it."""
    if step.pos.shape[1] == 1 and layer == 1 and view.v.shape[2] > 1:
        view.v = view.v.clone()
        newest = view.pos.argmax(1)
        for b, n in enumerate(newest.tolist()):
            view.v[b, :, n] = view.v[b, :, n - 1]


def shift_positions(view, layer, step):
    view.pos = torch.where(view.pos > 0, view.pos - 1, view.pos)
    view.all_visible = False


def late_position(pos, freq, dtype):
    """Right in the first call, one too many in every later one: the offset counted twice at the seam."""
    return rope_angles(torch.where(pos.min(1, keepdim=True).values > 0, pos + 1, pos), freq, dtype)


def sees_the_future(q_pos, k_pos, window=None, sinks=0):
    return (k_pos >= 0)[:, None, None, :].expand(-1, 1, q_pos.shape[1], -1)


def top_left(q_pos, k_pos, window=None, sinks=0):
    """is_causal's mask when there are more keys than queries: aligned at the wrong corner."""
    T, S = q_pos.shape[1], k_pos.shape[1]
    return torch.ones(T, S, dtype=torch.bool).tril()[None, None] & (k_pos >= 0)[:, None, None]


def sees_padding(q_pos, k_pos, window=None, sinks=0):
    return visible(q_pos, k_pos.clamp(min=0), window, sinks)


def one_key_more(q_pos, k_pos, window=None, sinks=0):
    return visible(q_pos, k_pos, None if window is None else window + 1, sinks)


def no_sinks(q_pos, k_pos, window=None, sinks=0):
    return visible(q_pos, k_pos, window, 0)


def ring_off_by_one(self, lengths, device=None):
    n, slot = torch.tensor(lengths)[:, None], torch.arange(self.slots)
    turns = (n - slot).div(self.window, rounding_mode="floor").clamp(min=0)
    pos = torch.where(slot < self.sinks, slot, slot + turns * self.window)
    return torch.where(slot < n, pos, -1)


def nibbles_swapped(packed, bits):
    return torch.stack([(packed >> shift) & (2**bits - 1) for shift in range(8 - bits, -1, -bits)], -1).flatten(-2)


decode = IntCodec.decode


def neighbours_scale(self, packed, scale, zero, dtype):
    return decode(self, packed, scale.roll(1, 3), zero, dtype)


def zero_point_lost(self, packed, scale, zero, dtype):
    return decode(self, packed, scale, torch.zeros_like(zero), dtype)


def sealed_early(self, p):
    return max(0, (p - self.residual + 1) // self.group * self.group)


def keys_turned_twice(self, step, begin=SlidingWindowCache._begin):
    begin(self, step)
    if self.turn_sinks and self.angles is not None:
        self.sink_k = {layer: self.k[layer][:, :, : self.sinks].clone() for layer in self.k}


def empty_is_zero(lengths, S, device):
    """Empty slots marked by position 0, as freshly zeroed memory would have it."""
    slots = torch.arange(S, device=device)
    return torch.where(slots < torch.tensor(lengths)[:, None], slots, 0)


def wrong_table(self, device, table_tensor=PagedCache._table_tensor):
    return table_tensor(self, device).flip(1)


def undo_the_ring_alone(self, step, undo=SlidingWindowCache._undo):
    sinks, self.sink_k = self.sink_k, {}
    undo(self, step)
    self.sink_k = sinks


def filled_with_the_longest_rows_block(self, device):
    longest = max((row.table for row in self.rows), key=len)
    return torch.tensor([row.table + longest[:1] * (len(longest) - len(row.table)) for row in self.rows])


def nothing(self, *args):
    """In place of a method that undoes or cleans."""


def chain_without_parent(before, ids, chain=BlockPool.chain):
    return chain(b"", ids)


def chain_without_order(before, ids, chain=BlockPool.chain):
    return chain(b"", ids[:1])


BUGS = {
    "position off by one in the view": ("full", [after(FullCache, shift_positions)]),
    "position off by one after prefill": ("full", [(kvlab.model, "rope_angles", late_position)]),
    "first token forgotten": ("full", [after(FullCache, forget_the_first)]),
    "first token forgotten, growing": ("growing", [after(GrowingCache, forget_the_first)]),
    "first token forgotten, paged": ("paged", [after(PagedCache, forget_the_first)]),
    "stale value": ("growing", [after(GrowingCache, stale_value)]),
    "stale value, paged": ("paged", [after(PagedCache, stale_value)]),
    "stale value, quantized": ("quantized", [after(QuantizedCache, stale_value)]),
    "the mask sees the future": ("full", [(kvlab.model, "visible", sees_the_future)]),
    "the chunk's mask is top-left": ("growing", [(kvlab.model, "visible", top_left)]),
    "padding is attended to": ("growing", [(kvlab.model, "visible", sees_padding)]),
    "empty slots are attended to": ("full", [(kvlab.caches.full, "slot_is_position", empty_is_zero)]),
    "window of one key more": ("sliding", [(kvlab.model, "visible", one_key_more)]),
    "sinks masked": ("sliding", [(kvlab.model, "visible", no_sinks)]),
    "ring off by one": ("sliding", [(SlidingWindowCache, "positions", ring_off_by_one)]),
    "sinks turned twice": ("turned sinks", [(SlidingWindowCache, "_begin", keys_turned_twice)]),
    "sinks never turned": ("turned sinks", [(SlidingWindowCache, "max_chunk", lambda self, T: T)]),
    "nibbles swapped": ("quantized", [(codecs_module, "unpack", nibbles_swapped)]),
    "scale of the neighbour group": ("quantized", [(IntCodec, "decode", neighbours_scale)]),
    "zero point lost": ("quantized", [(IntCodec, "decode", zero_point_lost)]),
    "sealed one token early": ("quantized", [(QuantizedCache, "sealed_at", sealed_early)]),
    "chunks longer than the rule allows": ("quantized", [(QuantizedCache, "max_chunk", lambda self, T: min(T, 7))]),
    "block table reversed": ("paged", [(PagedCache, "_table_tensor", wrong_table)]),
    "empty part of a block is attended to": ("paged", [(paged_module, "slot_is_position", empty_is_zero)]),
    "copy on write forgotten": ("fork", [(Row, "shared_tail", lambda self: None)]),
    "prefix hash without its parent": ("prefix", [(BlockPool, "chain", staticmethod(chain_without_parent))]),
    "short tables filled with another row's block": (
        "neighbours",
        [(PagedCache, "_table_tensor", filled_with_the_longest_rows_block)],
    ),
    "used blocks not cleared": ("neighbours", [(BlockPool, "clear", nothing)]),
    "a failed step stays, growing": ("rollback of growing", [(GrowingCache, "_undo", nothing)]),
    "a failed step stays, sliding": ("rollback of sliding", [(SlidingWindowCache, "_undo", nothing)]),
    "a failed step stays, quantized": ("rollback of quantized", [(QuantizedCache, "_undo", nothing)]),
    "a failed step stays, paged": ("rollback of paged", [(PagedCache, "_undo", nothing)]),
    "sinks stay turned": ("rollback of turned sinks", [(SlidingWindowCache, "_undo", undo_the_ring_alone)]),
    "prefix hash of one token": ("prefix", [(BlockPool, "chain", staticmethod(chain_without_order))]),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_check(bug, monkeypatch):
    check, patches = BUGS[bug]
    for target, name, planted in patches:
        monkeypatch.setattr(target, name, planted)
    with pytest.raises(AssertionError):
        CHECKS[check]()


def test_the_bugs_are_not_drowned_in_rounding():
    """In float64 a bug stands ten orders of magnitude above rounding, so the tolerance need not be fine-tuned."""
    from oracles import dense_logits, feed

    text = ids_for(2, [12])[0]
    right = feed(MODEL, make_cache("full", MODEL, 1, 12), [text], in_chunks([12], 3))[0]
    noise = (right - dense_logits(MODEL, text)).abs().max()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*after(FullCache, forget_the_first))
        wrong = feed(MODEL, make_cache("full", MODEL, 1, 12), [text], in_chunks([12], 3))[0]
    assert noise < 1e-13 and (wrong - right).abs().max() > 1e-2
