"""The exercises of notebook 06: tokens of a latent, the token that goes, bytes of layers that share."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvlab.exercise_kinds import Blank, Function, Number

GIB = 2**30


def latent_tokens() -> int:
    """How many tokens of DeepSeek-V2 a cache of 1 GiB holds in fp16: the catalog's shape, the calculator's bytes."""
    from kvlab.memory import kv_tokens

    return kv_tokens("deepseek-v2", GIB)


def _latent_mistakes():
    layers, heads, latent, turned, plain, value = 60, 128, 512, 64, 128, 128
    right = layers * (latent + turned) * 2
    return [
        (GIB // (2 * right), "a factor 2 too many: the latent stands for key and value both."),
        (2 * GIB // right, "in fp16 a number takes 2 bytes."),
        (GIB // (layers * latent * 2), "the turned key is missing: 64 numbers beside the latent."),
        (GIB // (layers * turned * 2), "that is the turned key alone; the latent is kept beside it."),
        (GIB // (layers * (2 * latent + turned) * 2), "the latent is kept once: it stands for key and value both."),
        (GIB // (right * heads), "there are 128 heads, but all of them share one latent and one turned key."),
        (GIB // (layers * (latent + heads * turned) * 2), "the turned key is one for all heads."),
        (GIB // (layers * heads * (plain + turned + value) * 2), "those are the keys and values of all heads, written "
         "out; the cache keeps what they are made of."),
        (GIB // (layers * heads * 2 * plain * 2), "those are keys and values of all heads; the cache keeps what they "
         "are made of."),
        (layers * GIB // right, "that is one layer; there are 60, and each keeps its own."),
        (10**9 // right, "you took 1 GiB as 10^9 bytes; it is 2^30."),
        (right, "that is what one token takes; how many of them fit into 1 GiB?"),
        (-(-GIB // right), "round down: a token that fits in part does not fit."),
    ]  # fmt: skip


def which_goes(scores: list[float], positions: list[int], newest: int, safe: int) -> int:
    """The place of the token with the lowest score, of those that may go; of equal scores, the oldest token."""
    places = [i for i, p in enumerate(positions) if p <= newest - safe]
    return min(places, key=lambda i: (scores[i], positions[i]))


def _safe_forgotten(s, p, n, safe):
    return min(range(len(p)), key=lambda i: (s[i], p[i]))


def _off_by_one(s, p, n, safe):
    return which_goes(s, p, n, safe - 1) if safe > 1 else which_goes(s, p, n, 1)


def _one_too_many_safe(s, p, n, safe):
    return which_goes(s, p, n, safe + 1)


VICTIM_MISTAKES = (
    (_safe_forgotten, "the newest tokens cannot go: a new token has been weighed by few queries, so its sum is low."),
    (_off_by_one, "`safe` counts the token that is being stored too: positions above newest - safe stay."),
    (_one_too_many_safe, "one too many is safe: position newest - safe may go."),
    (lambda s, p, n, safe: max((i for i, q in enumerate(p) if q <= n - safe), key=lambda i: s[i]),
     "that is the heaviest token; the lightest goes."),
    (lambda s, p, n, safe: min(range(len(p)), key=lambda i: p[i]),
     "that is the oldest token, as in a window; look at scores."),
    (lambda s, p, n, safe: min((i for i, q in enumerate(p) if q <= n - safe), key=lambda i: (s[i], -p[i])),
     "of equal scores the oldest token goes."),
    (lambda s, p, n, safe: p[which_goes(s, p, n, safe)],
     "that is the token's position; asked is its place in the lists: after evictions the two differ."),
)  # fmt: skip


def victim_cases(n: int = 24) -> list[tuple[list[float], list[int], int, int]]:
    """Heads after some evictions: holes between positions, slots in any order, equal scores among them.

    By turns the lightest is any token, the newest that may go, the oldest that is safe, the newest of all.
    """
    draw, cases = random.Random(6), []
    for case in range(n):
        size, newest, safe = draw.randrange(3, 7), draw.randrange(20, 40), draw.randrange(1, 6)
        edge = sorted({newest - safe, max(newest - safe, min(newest - safe + 1, newest - 1)), newest - 1})
        positions = draw.sample(range(newest - 16, newest - safe), size) + edge
        draw.shuffle(positions)
        scores = [draw.choice((0.25, 0.5, 1.5, round(draw.uniform(0.25, 3), 2))) for _ in positions]
        if case % 4:
            scores[positions.index(edge[min(case % 4, len(edge)) - 1])] = 0.125
        cases.append((scores, positions, newest, safe))
    return cases


@dataclass(frozen=True)
class Victim:
    """The answer is a function which_goes(scores, positions, newest, safe) -> place of the token to give up.

    It is tried on lists, and then decides in a cache, whose logits must be those of HeavyHitterCache.
    """

    title: str
    well_done: str
    hints: tuple[str, ...]

    def check(self, given) -> tuple[bool, list[str]]:
        if not callable(given):
            return False, ["The answer is the function which_goes(scores, positions, newest, safe) itself."]
        cases, results = victim_cases(), []
        for scores, positions, newest, safe in cases:
            call = f"which_goes({scores}, {positions}, {newest}, {safe})"
            try:
                out = given(list(scores), list(positions), newest, safe)
            except Exception as error:
                return False, [f"{call} raised {type(error).__name__}: {error}."]
            if out is None or out is ...:
                raise Blank(f"{call} returns nothing yet: it must return the place of the token that goes.")
            if isinstance(out, bool) or not isinstance(out, int):
                return False, [f"{call} must return a place in the lists, an int, not {out!r}."]
            results.append(out)
        truths = [which_goes(*case) for case in cases]
        if results != truths:
            for wrong, sentence in VICTIM_MISTAKES:
                if results == [wrong(*case) for case in cases]:
                    return False, [sentence[0].upper() + sentence[1:]]
            at = next(i for i, (a, b) in enumerate(zip(results, truths)) if a != b)
            scores, positions, newest, safe = cases[at]
            return False, [f"which_goes({scores}, {positions}, {newest}, {safe}) is {results[at]}; it must be "
                           f"{truths[at]}."]  # fmt: skip
        off = difference_in_a_cache(given)
        if off > 1e-12:
            return False, [f"Right on lists, but in a cache the logits are off by {off:.1e}: does it keep anything "
                           "between two calls?"]  # fmt: skip
        return True, [self.well_done]


def difference_in_a_cache(rule, tokens: int = 40, budget: int = 10) -> float:
    """The largest difference of logits, float64, between HeavyHitterCache and one in which `rule` picks the victims."""
    import torch

    from kvlab.caches import HeavyHitterCache
    from kvlab.check import tiny_model

    class Ruled(HeavyHitterCache):
        def _victim(self, layer, pos, may_go):
            score = self.slots[layer].by_head(self.score[layer], pos.shape[2])
            safe, newest = self.safe[layer][:, 0].tolist(), self.now[:, 0, 0].tolist()
            return torch.tensor([
                [rule(score[b, h].tolist(), pos[b, h].tolist(), newest[b], safe[h]) for h in range(pos.shape[1])]
                for b in range(pos.shape[0])
            ])  # fmt: skip

    model = tiny_model()
    ids = torch.randint(0, 499, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, theirs = (model(ids, kind(1, tokens, budget=budget, recent=0.3)) for kind in (Ruled, HeavyHitterCache))
    return (mine - theirs).abs().max().item()


def shared_bytes(owners: tuple[int, ...], kv_heads: int, head_dim: int, itemsize: int) -> tuple[int]:
    """Bytes of a token where layer i uses the keys and values of layer owners[i]."""
    return (len(set(owners)) * kv_heads * 2 * head_dim * itemsize,)


FEWER_EXERCISES = {
    "06.1": Number(
        "DeepSeek-V2: 60 layers, 128 heads, a latent of 512, a turned key of 64. How many tokens fit into 1 GiB, fp16?",
        latent_tokens,
        "A token takes 67.5 KiB. LLaMA-7B, a model with a quarter of the heads and about half the layers, needs 512.",
        (
            "What does a cache keep of a token in one layer? The latent and the turned key, once for all heads.",
            "The latent stands for key and value both: no factor 2.",
            "A token takes 60 layers * (512 + 64) numbers * 2 bytes; 1 GiB is 2**30 bytes. Round down.",
        ),
        _latent_mistakes,
        "tokens",
    ),
    "06.2": Victim(
        "Write which_goes(scores, positions, newest, safe): the place of the token that a head gives up.",
        "Right on lists, and in a cache: every logit is that of HeavyHitterCache.",
        (
            "Two steps: which places may go at all, and which of those has the lowest score.",
            "The newest `safe` tokens stay, the one being stored (position newest) included: p <= newest - safe.",
            "min(places, key=...) with a key of two parts: (scores[i], positions[i]) settles equal scores too.",
            "places = [i for i, p in enumerate(positions) if p <= newest - safe]; "
            "return min(places, key=lambda i: (scores[i], positions[i]))",
        ),
    ),
    "06.3": Function(
        "Write shared_bytes: bytes that a token takes where layers share.",
        "shared_bytes(owners, kv_heads, head_dim, itemsize) -> bytes",
        ("bytes",),
        (((0, 0, 2, 2), 3, 64, 2), ((0, 1, 2, 3), 2, 16, 4), ((0, 0, 0, 0, 0, 5), 8, 128, 2), ((0,), 1, 32, 1)),
        shared_bytes,
        "Only owners store anything, however many layers follow them.",
        (
            "A layer stores keys and values just if it is its own owner.",
            "How many different numbers are there in owners?",
            "len(set(owners)) * kv_heads * 2 * head_dim * itemsize",
        ),
        mistakes=(
            (lambda o, h, d, i: (len(o) * h * 2 * d * i,), "that counts every layer; a follower stores nothing."),
            (lambda o, h, d, i: (len(set(o)) * h * d * i,), "a key and a value: a factor 2 is missing."),
            (lambda o, h, d, i: (len(set(o)) * 2 * d * i,), "every KV head has a key and a value."),
            (lambda o, h, d, i: (len(set(o)) * h * 2 * d,), "those are numbers; each takes itemsize bytes."),
            (lambda o, h, d, i: ((len(o) - len(set(o))) * h * 2 * d * i,), "that is what is saved."),
            (lambda o, h, d, i: (len(o) // 2 * h * 2 * d * i,), "half of the layers is one map; this one may differ."),
            (lambda o, h, d, i: ((max(o) + 1) * h * 2 * d * i,), "count the owners; the layers between two of them "
             "follow and store nothing."),
        ),
    ),
}  # fmt: skip
