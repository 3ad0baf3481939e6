"""Explorer: sliders beside a picture. A change of a control redraws one SVG; nothing else happens.

    class Squares(Explorer):
        def controls(self):
            return {"n": slider("n", range(1, 11), 4, "how many squares")}
        def data(self, values):                     # a picture as kvlab/plots/data.py describes it
            return {"kind": "bars", "title": ..., ...}

or, without a class: Explorer({"n": ...}, data=lambda values: {...}). A notebook cell that ends in an explorer shows it.

It is made of plain ipywidgets controls and one widgets.HTML, wired with observe: that works the same in ipywidgets 7.7
(Colab) and 8, needs no script from elsewhere, and hides no exception (an Output widget would swallow it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape, unescape
from typing import Any, NamedTuple

import ipywidgets as widgets

from . import charts, figures, theme

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class Step(NamedTuple):
    """One stop of a sweep: which control stood where, and the aria-labels of what was drawn."""

    control: str
    value: Any
    labels: list[str]


def slider(label: str, choices: Sequence, value, tip: str, unit: str = "") -> widgets.Widget:
    """A slider over `choices` (numbers) in `unit` (theme.number); `tip` appears on hover.

    Choices rather than a range: lengths go 128, 256, 512, and every stop is a value that was meant.
    """
    named = unit not in ("", "B", "s", "%")  # a word goes beside the label: the read-out has room for a number
    options = [(theme.count(c) if named else theme.number(c, unit), c) for c in choices]
    return _control(widgets.SelectionSlider, f"{label} ({unit})" if named else label, tip, options=options, value=value)


def choice(label: str, options: Sequence, value, tip: str) -> widgets.Widget:
    """A drop-down list; options are values or (text, value) pairs."""
    return _control(widgets.Dropdown, label, tip, options=options, value=value)


def _control(kind: type, label: str, tip: str, **traits) -> widgets.Widget:
    hover = "tooltip" if kind.class_traits().get("tooltip") else "description_tooltip"  # ipywidgets 8, 7
    layout, wide = widgets.Layout(width="360px", max_width="100%"), {"description_width": "116px"}
    return kind(description=label, layout=layout, style=wide, **{hover: tip}, **traits)


class Explorer:
    """Controls and the picture they steer.

    controls  dict name -> ipywidgets control; or override `controls()`.
    data      values -> the picture's dict (data.py); or override `data`. render and snapshot both draw it.
    render    values -> HTML or SVG; override only for what data.py cannot say.
    strict    errors raise instead of being shown; None takes it from the environment, KVLAB_STRICT=1.

    The first picture is drawn when the explorer is made, so an error there fails the cell. Later errors stand in the
    picture's place and in `.last_error`, until a drawing succeeds.
    """

    def __init__(
        self,
        controls: dict[str, widgets.Widget] | None = None,
        data: Callable[[dict], dict] | None = None,
        render: Callable[[dict], str] | None = None,
        strict: bool | None = None,
    ):
        if data is not None:
            self.data = data
        if render is not None:
            self.render = render
        self.strict = os.environ.get("KVLAB_STRICT", "") == "1" if strict is None else strict
        self.last_error: Exception | None = None
        self._held = False
        self.by_name = dict(controls if controls is not None else self.controls())
        for name, control in self.by_name.items():
            if "value" not in control.trait_names():
                raise TypeError(f"control {name!r} is a {type(control).__name__}, which has no value to observe")
        self.html = widgets.HTML(self.render(self.values), layout=widgets.Layout(width="100%"))
        self._twin = (self.values, *self.snapshot()._repr_mimebundle_())  # now: an error in a display fails no cell
        for control in self.by_name.values():
            control.observe(self._changed, names="value")
        rows = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center")
        self.widget = widgets.VBox([widgets.Box(list(self.by_name.values()), layout=rows), self.html])

    # ---- what a subclass says ----------------------------------------------------------------------------------
    def controls(self) -> dict[str, widgets.Widget]:
        raise NotImplementedError(f"{type(self).__name__} was given no controls and does not override controls()")

    def data(self, values: dict) -> dict:
        raise NotImplementedError(f"{type(self).__name__} was given no data function and does not override data()")

    def render(self, values: dict) -> str:
        data = self.data(values)
        said = (
            f'<p style="margin:4px 8px;color:{theme.INK}">{escape(data["sentence"])}</p>' if "sentence" in data else ""
        )
        return (
            f'<div style="background:{theme.PAPER};padding:4px;font:15px {theme.FONT}">{charts.draw(data)}{said}</div>'
        )

    # ---- what a reader or a test does ----------------------------------------------------------------------------
    @property
    def values(self) -> dict:
        """Where the controls stand: name -> value."""
        return {name: control.value for name, control in self.by_name.items()}

    @property
    def labels(self) -> list[str]:
        """The aria-labels of what is drawn now: the pictures in words and numbers."""
        return [unescape(part.split('"', 1)[0]) for part in self.html.value.split('aria-label="')[1:]]

    def set(self, **values) -> Explorer:
        """Moves controls, draws once. A name or value that the controls lack: ValueError, and nothing has moved."""
        for name, value in values.items():
            if name not in self.by_name:
                raise ValueError(f"no control {name!r}; there are {', '.join(self.by_name)}")
            _check(name, self.by_name[name], value)
        with self._hold():
            for name, value in values.items():
                self.by_name[name].value = value
        self._draw()
        return self

    def sweep(self) -> Iterator[Step]:
        """Moves each control through every option (or minimum, middle, maximum), then all at once to either end.

        Yields a Step for each; raises what the drawing raised, whatever `strict` says; puts the controls back.
        """
        before, strict = self.values, self.strict
        self.strict = True
        stops = {name: _stops(control) for name, control in self.by_name.items()}
        try:
            for name, values in stops.items():
                for value in values:
                    self.set(**{name: value})
                    yield Step(name, value, self.labels)
                self.set(**{name: before[name]})
            for end in (0, -1):
                self.set(**{name: values[end] for name, values in stops.items()})
                yield Step("all", ("minimum", "maximum")[end], self.labels)
        finally:
            self.strict = strict
            self.set(**before)

    def snapshot(self, **values) -> figures.Picture:
        """The matplotlib twin, here or at other values: `.alt` and `.sentence` say it in words, `.data` is its dict."""
        return figures.draw(self.data({**self.values, **values}))

    def _repr_mimebundle_(self, include=None, exclude=None):
        """One output, two forms: a live notebook shows the widget; where its view is stripped, the PNG is left."""
        if self._twin[0] != self.values:
            self._twin = (self.values, *self.snapshot()._repr_mimebundle_())
        bundle, metadata = dict(self._twin[1]), self._twin[2]
        if getattr(self.widget, "model_id", None):  # ipywidgets 7 has none outside a kernel
            bundle[WIDGET_VIEW] = {"version_major": 2, "version_minor": 0, "model_id": self.widget.model_id}
        return bundle, metadata

    # ---- inside -----------------------------------------------------------------------------------------------
    def _changed(self, change) -> None:
        if not self._held:
            self._draw()

    def _draw(self) -> None:
        try:
            self.html.value, self.last_error = self.render(self.values), None
        except Exception as error:
            self.last_error = error
            if self.strict:
                raise
            kind, at = type(error).__name__, ", ".join(f"{k} = {v}" for k, v in self.values.items())
            self.html.value = (
                f'<div role="alert" data-error="{escape(kind)}" style="background:{theme.PAPER};color:{theme.ALERT};'
                f'border:2px solid {theme.ALERT};padding:12px;font:15px {theme.FONT}">'
                f"<b>{escape(kind)}</b>: {escape(str(error))}<br/><small>at {escape(at)}</small></div>"
            )

    @contextmanager
    def _hold(self):
        self._held = True
        try:
            yield
        finally:
            self._held = False


def _options(control) -> list | None:
    options = getattr(control, "options", None)
    if options is None:
        return None
    if isinstance(options, dict):
        return list(options.values())
    return [o[1] if isinstance(o, tuple) and len(o) == 2 else o for o in options]


def _stops(control) -> list:
    """The values a sweep visits."""
    options, now = _options(control), control.value
    if options is not None:
        return options
    if isinstance(now, bool):
        return [False, True]
    if not hasattr(control, "min"):
        return [now]
    lo, hi = control.min, control.max
    if hasattr(control, "base"):  # FloatLogSlider: min and max are exponents
        return [control.base**lo, control.base ** ((lo + hi) / 2), control.base**hi]
    middle = lo + (hi - lo) // 2 if isinstance(now, int) else (lo + hi) / 2
    return [(lo, lo), (lo, hi), (hi, hi)] if isinstance(now, tuple) else [lo, middle, hi]


def _check(name: str, control, value) -> None:
    options = _options(control)
    if options is not None and value not in options:
        raise ValueError(f"{name}={value!r} is not on its control; there are {', '.join(map(str, options))}")
    if options is None and hasattr(control, "min") and not isinstance(value, tuple):
        lo, hi = (
            (control.base**control.min, control.base**control.max)
            if hasattr(control, "base")
            else (control.min, control.max)
        )
        if not lo <= value <= hi:
            raise ValueError(f"{name}={value!r} is outside its control, which goes from {lo} to {hi}")
