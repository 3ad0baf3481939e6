"""The exercises of notebook 04: the cap, the ring, the reach. Each answer is computed when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.exercise_kinds import Blank, CacheClass, Function, Number

GIB = 2**30
SMOLLM2_LAYERS, FAR = 30, 1000


def largest_cap(free: int, texts: int, prompt: int, token_bytes: int) -> tuple[int]:
    """The largest max_new_tokens with which `texts` texts fit into `free` bytes: stream() asks for prompt + new - 1."""
    return (max(0, free // (texts * token_bytes) - prompt + 1),)


_WRONG_CAPS = (
    (
        lambda f, b, p, t: f // (b * t) - p,
        "off by one: the last new token is never fed back, so nothing is kept of it.",
    ),
    (lambda f, b, p, t: f // (b * t), "the prompt is kept too."),
    (lambda f, b, p, t: f // (b * t) + 1, "the prompt is kept too."),
    (lambda f, b, p, t: f // t - p + 1, "the bytes are shared by all texts."),
    (lambda f, b, p, t: f // t - b * p + 1, "that is for all texts together; each gets its part."),
    (lambda f, b, p, t: f // (b * t) - p + 2, "one too many: only the very last token is not kept."),
    (lambda f, b, p, t: -(-f // (b * t)) - p + 1, "round down: a token that fits in part does not fit."),
)
_CAP_MISTAKES = (
    (lambda *case: (case[0] // (case[1] * case[3]) - case[2] + 1,),
     "below 0 where not even the prompts fit; no tokens are 0 tokens."),
    *((lambda *case, rule=rule: (rule(*case),), words) for rule, words in _WRONG_CAPS),
    *((lambda *case, rule=rule: (max(0, rule(*case)),), words) for rule, words in _WRONG_CAPS),
)  # fmt: skip


def smallest_window(layers: int, distance: int) -> int:
    """The smallest window with which `layers` layers carry a token `distance` tokens on."""
    from kvlab.reach import reach

    return next(w for w in range(1, distance + 2) if reach(layers, w) >= distance)


def _window_mistakes():
    right = smallest_window(SMOLLM2_LAYERS, FAR)
    return [
        (right - 1, "a window counts the query's own key: it carries a token W - 1 on, not W."),
        (FAR / SMOLLM2_LAYERS, "a window counts the query's own key, and it is a whole number of tokens."),
        (FAR / SMOLLM2_LAYERS + 1, "a window is a whole number of tokens: round up."),
        (FAR // SMOLLM2_LAYERS, "round up, and a window counts the query's own key: it carries a token W - 1 on."),
        (FAR + 1, "that is what one layer needs; each further layer starts where the one below has got to."),
        (FAR, "one layer carries a token W - 1 on, and there are 30 of them, one on top of the other."),
        (SMOLLM2_LAYERS * (FAR - 1), "that is how far a window of 1,000 reaches; the question is the other way round."),
    ]


@dataclass(frozen=True)
class Ring(CacheClass):
    """The answer is a cache class whose slot(p) says where token p goes; check_cache grades the whole class."""

    expect: object = "window"

    def check(self, given) -> tuple[bool, list[str]]:
        if isinstance(given, type) and callable(getattr(given, "slot", None)) and (wrong := _wrong_slot(given)):
            return False, [wrong]
        right, words = super().check(given)
        if right and isinstance(given, type) and (empty := _slots_never_used(given)):
            one = "Slot" if len(empty) == 1 else "Slots"
            words.append(f"{one} {', '.join(map(str, empty))} never held a token: W - 1 earlier keys and the query's "
                         "own make W, so one is to spare.")  # fmt: skip
        return right, words


def _slots_never_used(given) -> list[int]:
    """The slots of a right ring that no token is written to; [] for a cache without slot()."""
    ring = given()
    if not callable(getattr(ring, "slot", None)):
        return []
    slots = ring.window + ring.sinks
    return sorted(set(range(slots)) - {int(ring.slot(p)) for p in range(3 * slots)})


def _wrong_slot(given) -> str:
    """What is wrong with the slots that a class gives, in a sentence, or "" if no mistake shows. Raises Blank."""
    ring = given()
    window, sinks = ring.window, ring.sinks
    owner: dict[int, int] = {}  # slot -> the token in it
    for p in range(3 * window + sinks):
        try:
            at = ring.slot(p)
        except Exception as error:
            return f"slot({p}) raised {type(error).__name__}: {error}."
        if at is None or at is ...:
            raise Blank(f"slot({p}) returns no slot yet: it must return one of 0 to {window + sinks - 1}.")
        if isinstance(at, bool) or not hasattr(at, "__index__"):  # a numpy int is one too
            return f"slot({p}) is {at!r}; a slot is an int."
        if not 0 <= at < window + sinks:
            return f"slot({p}) is {at}; there are {window + sinks} slots, 0 to {window + sinks - 1}."
        if owner.get(int(at), sinks) < sinks:
            return f"slot({p}) is {at}, where token {owner[int(at)]} lies: a sink, which stays for good."
        owner[int(at)] = p
    return ""


SLIDING_EXERCISES = {
    "04.1": Function(
        "Which max_new_tokens is the largest that fits?",
        "largest_cap(free, texts, prompt, token_bytes) -> max_new_tokens",
        ("max_new_tokens",),
        ((2 * GIB, 1, 1000, 2**19), (2 * GIB, 4, 500, 2**19), (10 * GIB, 16, 2000, 2**17), (1000, 3, 7, 12),
         (1000, 3, 70, 12)),
        largest_cap,
        "The cap is a promise about memory, and the only setting that costs no quality up to the cap.",
        (
            "How many tokens fit altogether, and how many of them belong to each text?",
            "Each text holds its prompt and its new tokens, but for the last one, which is never fed back.",
            "free // (texts * token_bytes) tokens each, less the prompt, and one more.",
        ),
        mistakes=_CAP_MISTAKES,
    ),
    "04.2": Ring(
        "Write the ring: slot(p) says in which of the window + sinks slots token p lives.",
        "Every logit equals that of the uncached model under the same window and sinks, and the memory stays as it is.",
        (
            "Without sinks: token 0 in slot 0, token 1 in slot 1, and after slot window - 1 comes slot 0 again.",
            "p % window does that: it overwrites token p - window, the one that has just left.",
            "A sink stays in slot p. The others share the `window` slots behind the sinks: count from there.",
            "return p if p < self.sinks else self.sinks + (p - self.sinks) % self.window",
        ),
    ),
    "04.3": Number(
        "What is the smallest window with which SmolLM2's 30 layers can still hear a token 1,000 tokens back?",
        lambda: smallest_window(SMOLLM2_LAYERS, FAR),
        "It can be heard, no more: each layer passes on a mixture, and section 6 shows how little of it is left.",
        (
            "One layer with window W carries a token W - 1 positions on.",
            "The layer above starts where the one below has got to: n layers carry it n (W - 1) on.",
            "The smallest W with 30 (W - 1) >= 1000.",
        ),
        _window_mistakes,
        "tokens",
    ),
}  # fmt: skip
