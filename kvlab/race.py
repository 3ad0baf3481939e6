"""A race: the same text, written with a cache and without, on one machine.

The lanes take turns, and each has its own clock, which runs only while it computes: the lane whose clock is behind
moves next. So both are measured undisturbed, and what you watch is what two machines side by side would show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from kvlab.generation import stream
from kvlab.measure import time_call
from kvlab.plots import figures, theme
from kvlab.tokenizer import StreamDecoder


@dataclass
class Lane:
    """One runner. clock[i] is this lane's own seconds when token i was there; text is what it has written."""

    variant: str
    steps: object
    decoder: StreamDecoder
    clock: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    stopped: bool = False

    @property
    def now(self) -> float:
        return self.clock[-1] if self.clock else 0.0

    def step(self, device) -> None:
        got = []
        taken = time_call(lambda: got.append(next(self.steps)), repeats=1, warmup=0, device=device).min
        self.clock.append(self.now + taken)
        self.tokens.append(got[0].token)
        self.text += self.decoder.push(got[0].token)
        self.finished = got[0].finished[0]
        if self.finished:
            self.text += self.decoder.flush()

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """Tokens a second between two of its tokens; over the whole run, prompt included, by default."""
        last = len(self.clock) - 1 if last is None else last
        before = self.clock[first - 1] if first else 0.0
        return (last - first + 1) / (self.clock[last] - before)


class Race:
    """Race(model, tokenizer, "a question").run(): watch it live; the result shows its picture, print(race) its texts.

    new_tokens: how much each lane writes (less if the model ends its answer); seconds: a lane stops when its own clock
    has reached them, finished or not. variants: "none" and any kind of make_cache. Greedy, so the texts should agree.
    """

    def __init__(self, model, tokenizer, prompt: str, new_tokens: int = 64, seconds: float = 60.0,
                 variants=("none", "full")):  # fmt: skip
        self.model, self.tokenizer, self.prompt, self.seconds = model, tokenizer, prompt, seconds
        self.ids, self.new_tokens, self.variants = tokenizer.chat(prompt), new_tokens, tuple(variants)
        self.lanes: list[Lane] = []

    def _lanes(self) -> list[Lane]:
        def steps(kind):
            cache = None if kind == "none" else kind
            return stream(self.model, self.ids, self.new_tokens, cache, stop_ids=self.tokenizer.stop_ids)

        for kind in self.variants:  # the first calls of all are slow, whoever makes them
            for _ in zip(range(2), steps(kind)):
                pass
        return [Lane(kind, steps(kind), StreamDecoder(self.tokenizer)) for kind in self.variants]

    def run(self, show: bool = True) -> Race:
        """Run all lanes to their end or to the time limit; in a notebook, show them while they run."""
        self.lanes = self._lanes()
        view = _live_view() if show else None
        shown = 0.0
        while running := [lane for lane in self.lanes if not (lane.finished or lane.stopped)]:
            lane = min(running, key=lambda lane: lane.now)
            lane.step(self.model.device)
            lane.stopped = not lane.finished and lane.now >= self.seconds
            if view is not None and (sum(x.now for x in self.lanes) - shown > 0.05 or len(running) == 1):
                shown = sum(x.now for x in self.lanes)
                view.value = self.html()
        if view is not None:
            view.value = self.html()
        return self

    def lane(self, variant: str) -> Lane:
        return next(lane for lane in self.lanes if lane.variant == variant)

    # ---- what it shows --------------------------------------------------------------------------------------------

    def html(self) -> str:
        """The lanes side by side, as they stand."""
        boxes = []
        for lane in self.lanes:
            look = theme.style(lane.variant)
            speed = f"{theme.digits(lane.speed())} tokens/s" if lane.clock else "&nbsp;"
            share = 100 * len(lane.tokens) / self.new_tokens
            boxes.append(
                f'<div style="flex:1 1 300px;box-sizing:border-box;padding:8px;border-radius:6px;'
                f"border:2px solid {look.color};background:{theme.PAPER};color:{theme.INK};"
                f'font:15px {theme.FONT};line-height:1.45">'
                f'<div style="color:{look.text}"><b>{look.name}</b> &nbsp; {len(lane.tokens)} tokens in '
                f"{theme.seconds(lane.now)} &nbsp; {speed}</div>"
                f'<div style="height:6px;margin:6px 0;width:{share:.0f}%;background:{look.color}"></div>'
                f'<div style="min-height:8em;white-space:pre-wrap">{escape(lane.text)}</div></div>'
            )
        return f'<div style="display:flex;flex-wrap:wrap;gap:12px;padding-right:6px">{"".join(boxes)}</div>'

    def data(self, note: str = "") -> dict:
        """The picture (plots/data.py): tokens finished against each lane's own time."""
        series = [
            {"variant": lane.variant, "x": [0.0, *lane.clock], "y": list(range(len(lane.clock) + 1)),
             "points": len(lane.clock) <= 64, "label": f"{theme.style(lane.variant).name}: "
             f"{theme.digits(lane.speed())} tokens/s"}
            for lane in self.lanes
        ]  # fmt: skip
        return {
            "kind": "lines", "title": "The same text, with and without a cache", "series": series,
            "x": {"label": "seconds of computing", "unit": "s", "scale": "linear"},
            "y": {"label": "tokens finished", "unit": "tokens", "scale": "linear"},
            "sentence": self.sentence(), "note": note,
        }  # fmt: skip

    def sentence(self) -> str:
        """Who was how far when the fastest lane was done."""
        first = min((x for x in self.lanes if x.finished), key=lambda x: x.now, default=None)
        if first is None:
            return f"No lane finished within {theme.seconds(self.seconds)}."
        words = [f"{theme.style(first.variant).name}: {len(first.tokens)} tokens after {theme.seconds(first.now)}."]
        for lane in self.lanes:
            if lane is not first:
                then = sum(t <= first.now for t in lane.clock)
                end = "stopped by the time limit" if lane.stopped else "finished"
                words.append(
                    f"{theme.style(lane.variant).name}: {then} by then, {end} with {len(lane.tokens)} "
                    f"after {theme.seconds(lane.now)}."
                )
        return " ".join(words)

    def __str__(self):
        parts = []
        for lane in self.lanes:
            state = "stopped by the time limit" if lane.stopped else "finished"
            head = f"{theme.style(lane.variant).name}: {len(lane.tokens)} tokens, {theme.seconds(lane.now)}, {state}"
            parts.append(f"{head}\n{lane.text}")
        return "\n\n".join(parts)

    def _repr_mimebundle_(self, include=None, exclude=None):
        return figures.draw(self.data())._repr_mimebundle_(include, exclude)


def _live_view():
    """A widgets.HTML that a running kernel shows at once; None outside a notebook."""
    from IPython import get_ipython

    if getattr(get_ipython(), "kernel", None) is None:
        return None
    import ipywidgets as widgets
    from IPython.display import display

    view = widgets.HTML(layout=widgets.Layout(width="100%"))
    display(view)
    return view
