"""The block pool over time, coloured by request: a recorded run, one step of it, and the explorer that plays it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import ipywidgets as widgets

from ..serving.rivals import VOCAB, allocator_for, scheduler_for
from ..serving.simulation import Simulation
from ..serving.trace import State, Trace
from ..workloads import workload
from . import theme
from .explorer import Explorer, choice, slider

SLOTS, CELL, LONGEST, PREFIX, BUDGET = 192, 8, 64, 16, 32  # of the run; a cell is a block, or 8 slots of a range
SHARED = "shared"
KEPT = {
    "paged, prefix shared": ("paged-8", True),
    "paged in blocks of 8": ("paged-8", False),
    "a power of two": ("doubling", False),
    "64 slots reserved": ("reserved", False),
}


@lru_cache(8)
def recorded(kept: str = "paged, prefix shared") -> Trace:
    """Twelve requests that come one after another and begin alike, served without a model in SLOTS slots -> its trace.

    kept: a key of KEPT. Raises ValueError for another one.
    """
    if kept not in KEPT:
        raise ValueError(f"kept={kept!r} is none of {', '.join(KEPT)}")
    name, sharing = KEPT[kept]
    made = workload(12, rate=0.5, shared_prefix=PREFIX, prompt_median=14, output_median=20, sigma=0.7,
                    max_model_len=LONGEST, seed=1)  # fmt: skip
    scheduler = scheduler_for(name, allocator_for(name, SLOTS, LONGEST, sharing), BUDGET)
    for _ in Simulation(scheduler, made, VOCAB):
        pass
    return scheduler.trace


class Piece(NamedTuple):
    """One piece of memory at one step: how many of its slots have a token, from which of them on they were written in
    this step, and who holds it, in order of arrival."""

    filled: int
    old: int
    holders: list


def pieces(state: State) -> dict[tuple[int, int], Piece]:
    """(first slot, slots) -> Piece."""
    found: dict[tuple[int, int], Piece] = {}
    for r in state.running:
        left = r.num_computed_tokens(state.step)  # tokens that lie in this piece or behind it
        for at in r.pieces:
            here, old, holders = found.get(at, Piece(0, 0, []))
            mine = max(0, min(left, at[1]))
            old = max(old, mine if left - r.rate >= at[1] else max(0, left - r.rate))
            found[at] = Piece(max(here, mine), old, [*holders, r.id])
            left -= at[1]
    return found


def spans(trace: Trace, at: int | None = None, title: str = "Memory over time") -> dict:
    """A trace as a picture of kind "spans"; pieces with several holders have a colour of their own."""
    open_: dict[tuple, dict] = {}
    done, groups = [], colors(trace)
    for state in trace.replay():
        mine = {(at, owner(piece.holders)): piece.filled for at, piece in pieces(state).items()}
        for key in [key for key in open_ if key not in mine]:
            done.append(open_.pop(key))
        for key, n in mine.items():
            if key not in open_:
                (start, slots), id = key
                open_[key] = {"start": start, "slots": slots, "begin": state.step, "filled": [],
                              "group": groups[id], "name": str(id)}  # fmt: skip
            open_[key]["filled"].append(n)
    done += open_.values()
    longest: dict[str, dict] = {}
    for s in done:
        s["end"] = s["begin"] + len(s["filled"])
        if len(s["filled"]) > len(longest.get(s["name"], {"filled": []})["filled"]):
            longest[s["name"]] = s
    for s in done:  # a name is written once, where it has most room
        s["name"] = s["name"] if longest[s["name"]] is s else ""
    return {
        "kind": "spans", "title": title, "lanes": trace.num_slots, "steps": trace.step, "spans": done, "at": at,
        "x": {"label": "model step"}, "y": {"label": "slot (pale: held, but empty)"},
    }  # fmt: skip


def owner(holders: list) -> int | str:
    return holders[0] if len(holders) == 1 else SHARED


def colors(trace: Trace) -> dict:
    """Request -> the number of its colour, in order of arrival; the last colour is for what several share."""
    ids, last = dict.fromkeys(e.request for e in trace.events if e.kind == "added"), len(theme.GROUPS) - 1
    return {id: i % last for i, id in enumerate(ids)} | {SHARED: last}


def cells(trace: Trace, step: int, cell: int = CELL) -> list[dict]:
    """The memory at one step, `cell` slots a cell: who holds it, and whether it was written or is full.

    Pieces must be whole cells.
    """
    groups, found = colors(trace), [{"text": "", "state": "free"} for _ in range(trace.num_slots // cell)]
    for (start, slots), piece in pieces(trace.state_at(step)).items():
        for first in range(start, start + slots, cell):
            here, old = (min(max(n - first + start, 0), cell) for n in (piece.filled, piece.old))
            kind = "new" if here > old else "held" if here == cell else "reserved"
            n = len(piece.holders)
            name = f"×{n}" if n > 1 else str(piece.holders[0]).removeprefix("r")
            found[first // cell] = {
                "text": name,
                "state": kind,
                "group": groups[owner(piece.holders)],
                "full": here == cell,
            }
    return found


def said(trace: Trace, step: int) -> str:
    """One step in a sentence."""
    state = trace.state_at(step)
    now = pieces(state)
    waiting = [str(r.id) for r in state.waiting]
    held, tokens = sum(slots for _, slots in now), sum(piece.filled for piece in now.values())
    shared = sum(len(piece.holders) > 1 for piece in now.values())
    words = (
        f"Step {step}: {len(state.running)} requests run and {len(waiting)} wait"
        f"{' (' + ', '.join(waiting) + ')' if waiting else ''}; {held} of {trace.num_slots} slots are held"
    )
    words += f", {tokens} of them with a token" + (f"; {shared} blocks have several holders." if shared else ".")
    events = [e for e in trace.events if e.step == step and e.kind in ("admitted", "preempted")]
    for kind in ("preempted", "admitted"):
        if ids := list(dict.fromkeys(str(e.request) for e in events if e.kind == kind)):
            words += f" {' and '.join(ids)} {'is' if len(ids) == 1 else 'are'} {kind}."
    return words


def pool_at(trace: Trace, step: int, title: str, across: int = 12) -> dict:
    """The run so far and to come, and the memory at `step` beneath it. A step after the end shows the empty memory."""
    over = step >= trace.step
    line = {**spans(trace, step, title), "tall": 1.7}
    now = [{"state": "free"}] * (trace.num_slots // CELL) if over else cells(trace, step)
    rows = [
        {"label": f"{i * CELL}-{(i + across) * CELL - 1}", "cells": now[i : i + across]}
        for i in range(0, len(now), across)
    ]
    grid = {
        "kind": "slots", "title": f"At step {step}: a cell is {CELL} slots; ×2: two requests share it", "rows": rows,
        "tall": 0.8, "states": {"held": "full, and whose", "reserved": "not full yet"},
    }  # fmt: skip
    sentence = f"All was done after step {trace.step - 1}." if over else said(trace, step)
    return {"kind": "panels", "title": "The pool", "panels": [[line, grid]], "sentence": sentence, "size": (9.2, 5.8)}


class PoolExplorer(Explorer):
    """The same twelve requests in the same 192 slots, kept in four ways; a slider and a play button move the step.

    play: the button. It moves the slider from where that stands; both are wired with observe, as Colab needs it.
    """

    def __init__(self, **kw):
        super().__init__(**kw)
        last = max(self.by_name["step"].options, key=lambda option: option[1])[1]
        self.play = widgets.Play(value=self.values["step"], min=0, max=last, interval=250)
        self.play.observe(self._played, names="value")
        self.by_name["step"].observe(self._moved, names="value")
        self._playing = False
        box = self.widget.children[0]
        box.children = (self.play, *box.children)

    def controls(self):
        steps = range(max(recorded(kept).step for kept in KEPT))
        return {
            "step": slider("model step", steps, 24, "which step of the run"),
            "kept": choice("kept", list(KEPT), next(iter(KEPT)), "how requests get their slots"),
        }

    def data(self, values: dict) -> dict:
        trace = recorded(values["kept"])
        return pool_at(trace, values["step"], f"12 requests, {values['kept']}: done after {trace.step} steps")

    def _played(self, change) -> None:
        self._playing = True  # the button has moved already: do not push it back while it runs on
        try:
            self.by_name["step"].value = change["new"]
        finally:
            self._playing = False

    def _moved(self, change) -> None:
        if not self._playing:
            self.play.value = change["new"]
