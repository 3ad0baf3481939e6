"""Latent attention: against its formulas, its two forms against each other, its cost, its bytes, and what must fail."""

import copy
import dataclasses
import re

import pytest
import torch
from mla_oracle import LATENT, latent_logits, latent_toy
from oracles import assert_logits, ids_for
from torch import nn

from kvlab import cost
from kvlab.attention import View, rope
from kvlab.caches import GrowingCache, adopt, make_cache
from kvlab.check import check_cache
from kvlab.config import ModelConfig
from kvlab.generation import generate
from kvlab.measure import count_flops
from kvlab.memory import estimate
from kvlab.mla import compare_sharing, set_form
from kvlab.model import GPT

FORMS = ("absorbed", "expanded")
MODELS = {
    "low-rank queries": {},
    "plain queries, biases": {"q_lora_rank": None, "attention_bias": True},
    "another shape": {"kv_lora_rank": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 2, "v_head_dim": 1},
    "windows": {"sliding_window": 4, "layer_types": ("sliding_attention", "full_attention")},
    "a layer follows another": {"num_hidden_layers": 3, "kv_owner": (0, 1, 0)},
    "faster rope, tied": {"rope_theta": 50.0, "tie_word_embeddings": True},
}
DEEPSEEK_V2 = ModelConfig(vocab_size=102400, hidden_size=5120, intermediate_size=12288, num_hidden_layers=60,
                          num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128,
                          qk_rope_head_dim=64, v_head_dim=128)  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2.with_(hidden_size=7168, num_hidden_layers=61, layer_types=None)
TEXT = ids_for(3, [19])[0]


def own_toy(form=None, **changes):
    """A copy whose form may be set."""
    model = copy.deepcopy(latent_toy(**changes))
    set_form(model, form)
    return model


@torch.no_grad()
def logits(model, ids=TEXT, cache=None):
    return model(torch.tensor([ids]), cache)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_formulas_of_the_paper(changes, form):
    model = own_toy(form, **changes)
    want = latent_logits(model, TEXT)
    assert want.std() > 0.3  # else a tolerance would say little
    assert_logits(logits(model), want)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_absorbed_equals_expanded(changes):
    assert_logits(logits(own_toy("absorbed", **changes)), logits(own_toy("expanded", **changes)))


def test_scores_fall_with_distance_alone():
    """Moving a whole text changes nothing: positions enter through r_t, by differences."""
    model = own_toy()
    with torch.no_grad():
        moved = model(torch.tensor([TEXT]), pos=torch.arange(100, 100 + len(TEXT))[None])[0]
    assert_logits(moved, logits(model))
    upside_down = model(torch.tensor([TEXT]), pos=torch.arange(len(TEXT))[None] * 2)[0]
    assert (upside_down - moved).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5}], ids=["full", "window"])
def test_generate_says_the_same_with_and_without_a_cache(changes):
    model = own_toy(**changes)
    prompts = ids_for(8, [9, 4])
    want = [generate(model, [p], max_new_tokens=8, cache=None) for p in prompts]
    got = generate(model, prompts, max_new_tokens=8, cache=make_cache("full", model, 2, 32))
    assert [list(row) for row in got] == [list(rows[0]) for rows in want]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_other_dtypes(dtype):
    want = logits(own_toy())
    for form in FORMS:
        model = own_toy(form).to(dtype)
        got = logits(model, cache=make_cache("paged", model, 1, 32))
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() < {torch.float32: 1e-4}.get(dtype, 0.5)


# ---- what a cache is given, and what it may ask for


class Recorder(GrowingCache):
    """Keeps what it was given and shown; scale: what its views ask for."""

    def __init__(self, wants_weights=False, scale=None):
        super().__init__(1)
        self.wants_weights, self.scale, self.given, self.weights = wants_weights, scale, [], []

    def _write(self, layer, k, v, step):
        self.given.append((k, v))
        return dataclasses.replace(super()._write(layer, k, v, step), scale=self.scale)

    def observe(self, layer, weights):
        self.weights.append((layer, weights))


def test_a_cache_is_given_the_latent_and_the_turned_key():
    model, cache = own_toy(), Recorder()
    logits(model, cache=cache)
    c, T = model.config, len(TEXT)
    for k, v in cache.given:
        assert k.shape == (1, 1, T, c.kv_lora_rank) and v.shape == (1, 1, T, c.qk_rope_head_dim)
    h = model.layers[0].input_layernorm(model.embed_tokens(torch.tensor(TEXT)))
    attention = model.layers[0].self_attn
    latent = attention.kv_a_layernorm(attention.kv_a_proj_with_mqa(h)[:, : c.kv_lora_rank])
    assert_logits(cache.given[0][0][0, 0], latent, what="latents")


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_summed_over_all_heads(form):
    model, cache, want = own_toy(form), Recorder(wants_weights=True), []
    latent_logits(model, TEXT, weights=want)
    for part in (TEXT[:11], TEXT[11:]):
        assert_logits(
            logits(model, part, cache), latent_logits(model, TEXT)[cache.lengths[0] - len(part) :][: len(part)]
        )
    T = len(TEXT)
    assert [layer for layer, _ in cache.weights] == [0, 1, 0, 1]
    for n, (layer, weights) in enumerate(cache.weights):
        rows = slice(0, 11) if n < 2 else slice(11, T)
        S = 11 if n < 2 else T
        assert weights.shape == (1, 1, rows.stop - rows.start, S)
        assert_logits(weights[0, 0], want[layer][rows, :S], what="weights")
        assert_logits(weights.sum(-1), torch.full_like(weights[..., 0], 4.0), what="sum over tokens")


@pytest.mark.parametrize("form", FORMS)
def test_a_view_may_set_the_scale(form):
    model = own_toy(form)
    asked = logits(model, cache=Recorder(scale=0.5))
    for layer in model.layers:
        assert layer.self_attn.scale == 14**-0.5
        layer.self_attn.scale = 0.5
    assert_logits(asked, logits(model))
    assert (asked - logits(own_toy(form))).abs().max() > 1e-2


class Mine:
    """A reader's own cache. spoil: what it does to its views."""

    def __init__(self, spoil=lambda view: view):
        self.held, self.spoil = {}, spoil

    def append(self, layer, k, v, pos):
        if layer in self.held:
            k, v, pos = (torch.cat((old, new), -2 + (new.dim() < 3)) for old, new in zip(self.held[layer], (k, v, pos)))
        self.held[layer] = k, v, pos
        return self.spoil(View(k, v, pos))


def test_check_cache_grades_a_cache_on_a_latent_model():
    model = own_toy().requires_grad_(False)
    for kind, expect in (("paged", "exact"), ("sliding", "window")):
        options = {"window": 6, "sinks": 2} if kind == "sliding" else {}
        report = check_cache(lambda m, B, n: make_cache(kind, m, B, n, **options), model, expect)  # noqa: B023
        assert report.ok, report
    assert check_cache(lambda m, B, n: Mine(), model).ok
    for spoil, words in (
        (lambda view: dataclasses.replace(view, v=view.v.roll(1, 2)), "Stale values"),
        (lambda view: dataclasses.replace(view, scale=16**-0.5), r"root of qk_nope_head_dim \+ qk_rope_head_dim=14"),
        (lambda view: dataclasses.replace(view, v=view.k), r"View.v has shape .*; it must be .* = \(1, 1, S, 8\)"),
        (lambda view: dataclasses.replace(view, k=view.k.half().double()), "The dtype changes on the way: the keys"),
    ):
        report = check_cache(lambda m, B, n: Mine(spoil), model)  # noqa: B023
        assert not report.ok and re.search(words, str(report)), report


def test_a_view_of_several_heads_is_refused():
    cache = adopt(Mine(lambda view: dataclasses.replace(view, k=view.k.repeat(1, 4, 1, 1))))
    with pytest.raises(ValueError, match="the view has 4 heads; a latent model's has one, which serves all heads"):
        logits(own_toy(), cache=cache)


# ---- planted bugs: each must be seen


def scale_of_the_stored_width(model):
    for layer in model.layers:
        layer.self_attn.scale = (LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]) ** -0.5


def scale_without_the_rope_part(model):
    for layer in model.layers:
        layer.self_attn.scale = LATENT["qk_nope_head_dim"] ** -0.5


def patched(change):
    def plant(model):
        for layer in model.layers:
            attention = layer.self_attn
            right = attention.latent
            attention.latent = lambda x, now, a=attention, right=right: change(a, *right(x, now), now)

    return plant


def norm_forgotten(model):
    for layer in model.layers:
        layer.self_attn.kv_a_layernorm = nn.Identity()


def query_norm_forgotten(model):
    for layer in model.layers:
        layer.self_attn.q_a_layernorm = nn.Identity()


def keys_and_values_swapped(model):
    for layer in model.layers:
        right = layer.self_attn.unfolding
        layer.self_attn.unfolding = lambda right=right: tuple(w.roll(1, 0) for w in right())


def narrow(x, now):
    """The angles as far as x is wide."""
    return tuple(a.repeat(1, 1, 1, 2)[..., : x.shape[-1]] for a in now.angles)


BUGS = {
    "scale 1/sqrt(R + rope)": scale_of_the_stored_width,
    "scale 1/sqrt(nope)": scale_without_the_rope_part,
    "rope applied to the latent": patched(lambda a, c, r, now: (rope(c, narrow(c, now)), r)),
    "rope applied twice": patched(lambda a, c, r, now: (c, rope(r, now.angles))),
    "norm applied to the turned key": patched(lambda a, c, r, now: (c, r / r.pow(2).mean(-1, keepdim=True).sqrt())),
    "norm applied twice": patched(lambda a, c, r, now: (a.kv_a_layernorm(c), r)),
    "latent norm forgotten": norm_forgotten,
    "query norm forgotten": query_norm_forgotten,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plant", BUGS.values(), ids=BUGS)
def test_planted_bugs_are_seen(plant, form):
    model = own_toy(form)
    want = latent_logits(model, TEXT)
    plant(model)
    assert (logits(model) - want).abs().max() > 1e-3


def test_heads_that_get_each_others_matrices_are_seen():
    model = own_toy("absorbed")
    keys_and_values_swapped(model)
    assert (logits(model) - latent_logits(model, TEXT)).abs().max() > 1e-3


# ---- cost


@pytest.mark.parametrize("q_lora_rank", [None, 12])
@pytest.mark.parametrize("form", [*FORMS, None])
@pytest.mark.parametrize("T, S", [(1, 1), (1, 40), (7, 7), (7, 30), (30, 34)])
def test_the_closed_form_is_what_is_counted(form, T, S, q_lora_rank):
    model = own_toy(form, q_lora_rank=q_lora_rank)
    cache = make_cache("full", model, 1, 64)
    ids = ids_for(1, [S])[0]
    if S > T:
        logits(model, ids[: S - T], cache)
    with count_flops(model) as counted:
        logits(model, ids[S - T :], cache)
    c = model.config
    one = cost.latent_flops(c, T, S, form)
    mlp_and_head = T * (2 * 6 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size * c.vocab_size)
    assert (counted.projections, counted.attention) == (2 * one.projections + mlp_and_head, 2 * one.attention)
    if form is None:
        assert counted.total == cost.forward_flops(c, T, S, logits=T).total
        assert one.total == min(cost.latent_flops(c, T, S, f).total for f in FORMS)


def test_decoding_is_absorbed_and_a_prompt_expanded():
    for config in (DEEPSEEK_V2, DEEPSEEK_V3):
        assert cost.cheaper_form(config, 1, 4096) == "absorbed"
        assert cost.cheaper_form(config, 4096, 4096) == "expanded"
    c = DEEPSEEK_V2
    width = c.qk_nope_head_dim + c.v_head_dim
    turn = c.kv_lora_rank / (2 * c.kv_lora_rank / width - 1)  # the docstring's, for many tokens in view
    forms = [cost.cheaper_form(c, T, 10**7) for T in range(1, 400)]
    assert (
        forms.index("expanded") + 1 == pytest.approx(turn, rel=0.01)
        and "absorbed" not in forms[forms.index("expanded") :]
    )
    assert cost.cheaper_form(c, 1, 1) == "expanded"


@pytest.mark.parametrize("kind, window", [("none", None), ("full", None), ("sliding", 6)])
def test_a_generation_costs_the_sum_of_its_steps(kind, window):
    model = own_toy()
    cache = None if kind == "none" else make_cache("full", model, 1, 64) if kind == "full" else None
    if kind == "sliding":
        cache = make_cache("sliding", model, 1, 64, window=window)
    with count_flops(model) as counted:
        generate(model, [TEXT[:5]], max_new_tokens=9, cache=cache)
    assert (counted.projections, counted.attention) == cost.generation_flops(model.config, kind, 5, 9, window)


@pytest.mark.parametrize("kv_owner", [None, (0, 0)], ids=["own", "shared by layers too"])
def test_sharing_compared_is_what_models_count_and_caches_hold(kv_owner):
    config = ModelConfig(vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, kv_owner=kv_owner,
                         q_lora_rank=12, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4,
                         v_head_dim=8)  # fmt: skip
    rows = compare_sharing(config, seen=25, groups=2, itemsize=4)
    assert [row.name for row in rows] == ["MHA", "GQA, 2 KV heads", "MQA", "MLA, absorbed", "MLA, expanded"]
    for row in rows:
        model = GPT(row.config)
        if row.config.kv_lora_rank:
            set_form(model, row.name.split()[-1])
        cache = make_cache("full", model, 1, 25)
        logits(model, ids_for(0, [24], 20)[0], cache)
        with count_flops(model) as counted:
            logits(model, [7], cache)
        rest = 2 * 6 * 32 * row.config.intermediate_size + 2 * 32 * 20
        assert (counted.projections - rest, counted.attention) == (row.projections, row.attention), row.name
        assert cache.nbytes == 25 * row.bytes_per_token


def test_deepseek_v2_stores_as_much_as_two_and_a_quarter_kv_heads():
    """The paper's Table 1: 9/2 d_h numbers a token and layer, against 2 n_h d_h, 2 n_g d_h and 2 d_h."""
    by = {row.name: row for row in compare_sharing(DEEPSEEK_V2, 4096, groups=8)}
    mla = by["MLA, absorbed"]
    assert mla.bytes_per_token == by["MLA, expanded"].bytes_per_token == 60 * (512 + 64) * 2
    assert mla.bytes_per_token / by["MQA"].bytes_per_token == 2.25
    assert by["MHA"].bytes_per_token / by["MQA"].bytes_per_token == 128
    assert mla.projections + mla.attention < by["MLA, expanded"].projections  # unfolding 4,096 latents for one query
    assert mla.attention > by["MHA"].attention  # what the small cache costs


# ---- bytes


def test_bytes_of_a_token():
    assert DEEPSEEK_V3.kv_bytes_per_token() == 61 * (512 + 64) * 2 == 70272
    assert estimate(DEEPSEEK_V3, 1, 1).kv_bytes_per_token == 70272
    assert estimate(DEEPSEEK_V3, 1, 1, mla=False).kv_bytes_per_token == 61 * 128 * (192 + 128) * 2
    model = own_toy()
    c = model.config
    assert (c.kv_shape, c.group_size, c.head_dim) == ((1, 16, 8), 4, 8)
    assert c.kv_bytes_per_token(8) == 2 * (16 + 8) * 8
    cache = make_cache("full", model, 3, 20)
    model(torch.tensor([TEXT] * 3), cache)
    assert cache.nbytes == 3 * 20 * c.kv_bytes_per_token(8) == 2 * estimate(c, 3, 20, kv_dtype="fp32").kv_cache_bytes
    assert cost.held_bytes(c, "full", 20, itemsize=8) * 3 == cache.nbytes


# ---- refusals


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kv_lora_rank": None}, "q_lora_rank|qk_nope_head_dim=6 is a size of latent attention: it needs kv_lora_rank"),
        ({"qk_nope_head_dim": None}, "kv_lora_rank=16 asks for latent attention, which needs qk_nope_head_dim too"),
        ({"qk_rope_head_dim": None}, "needs qk_rope_head_dim too"),
        ({"v_head_dim": None}, "needs v_head_dim too"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 must be even: RoPE turns pairs"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0 must be at least 1"),
        ({"q_lora_rank": 0}, "q_lora_rank=0 must be at least 1"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads=2 with kv_lora_rank=16: all heads share one latent, so leave",
        ),
        ({"head_dim": 16}, r"head_dim=16 with kv_lora_rank=16: .* leave head_dim out \(or state 8\)"),
        ({"qkv_bias": True}, "qkv_bias=True with kv_lora_rank=16: latent attention has only attention_bias"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit(changes, message):
    fields = {**LATENT, "hidden_size": 32, "num_attention_heads": 4, "q_lora_rank": 12}
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**fields, **changes})


def test_sizes_are_ints():
    with pytest.raises(TypeError, match="v_head_dim=8.0 must be an int"):
        ModelConfig(**{**LATENT, "v_head_dim": 8.0})
    with pytest.raises(ValueError, match="q_lora_rank=3 is a size of latent attention"):
        ModelConfig(q_lora_rank=3)


def test_forms_and_models_that_do_not_exist():
    with pytest.raises(ValueError, match="form='fast' must be 'absorbed', 'expanded' or None"):
        set_form(own_toy(), "fast")
    with pytest.raises(ValueError, match="form='fast' must be 'absorbed', 'expanded' or None"):
        cost.latent_flops(DEEPSEEK_V2, 1, 1, "fast")
    with pytest.raises(ValueError, match="this model has no latent attention"):
        set_form(GPT(ModelConfig(num_hidden_layers=1)), "absorbed")
    with pytest.raises(ValueError, match="config has no kv_lora_rank"):
        compare_sharing(ModelConfig(), 10, 2)
    with pytest.raises(ValueError, match="num_key_value_heads=3 must divide"):
        compare_sharing(DEEPSEEK_V2, 10, 3)
