"""The rivals: what the default workload must show, and books that balance whatever arrives."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import ModelConfig
from kvlab.generation import generate
from kvlab.measure import count_flops
from kvlab.model import GPT
from kvlab.serving.engine import Engine
from kvlab.serving.padded import padded_batches
from kvlab.serving.request import Request, Status
from kvlab.serving.rivals import RIVALS, allocator_for, compare, scheduler_for, simulate
from kvlab.serving.simulation import Feed, Simulation
from kvlab.workloads import Arrival, prompt_ids, workload

SLOTS = 64 * 2**20 // 23_040 // 16 * 16  # 64 MiB of SmolLM2 in fp16: 182 blocks of 16
SCHEDULED = [name for name in RIVALS if name != "padded"]


@pytest.fixture(scope="module")
def default():
    """200 requests of the default workload in each rival: {name: Figures}."""
    assert SLOTS == 182 * 16
    return {f.name: f for f in compare(workload(200), SLOTS)}


def test_utilization_of_the_default_workload(default):
    assert default["paged-16"].utilization > 0.96
    assert 0.28 < default["reserved"].utilization < 0.36
    assert 0.66 < default["doubling"].utilization < 0.74
    paged = [default[f"paged-{n}"].utilization for n in (1, 8, 16, 64, 256)]
    assert paged == sorted(paged, reverse=True) and paged[0] == 1
    assert default["packed"].utilization == 1 > default["padded"].utilization


def test_only_doubling_strands_slots_and_fails_with_half_the_memory_free(default):
    f = default["doubling"]
    assert f.external_fragmentation > 0.1 and f.gap_failures > 10 and f.most_free_at_failure > 0.5
    assert f.moved_tokens > 0
    for name in set(default) - {"doubling"}:
        f = default[name]
        assert (f.external_fragmentation, f.gap_failures, f.moved_tokens) == (0, 0, 0)


def test_paged_holds_twice_as_many_and_ends_sooner_in_the_same_memory(default):
    paged, reserved = default["paged-16"], default["reserved"]
    assert paged.mean_requests > 2 * reserved.mean_requests and paged.peak_requests > 2 * reserved.peak_requests
    assert reserved.peak_requests == SLOTS // 1024
    assert 1.5 * paged.model_steps < reserved.model_steps
    assert paged.tokens_per_step > 1.5 * reserved.tokens_per_step
    assert default["doubling"].model_steps > paged.model_steps
    assert default["packed"].model_steps > paged.model_steps
    assert default["padded"].model_steps > reserved.model_steps  # continuous batching alone
    model, itemsize = ModelConfig(vocab_size=49152), 2
    reads = {name: f.bytes_read(269_000_000, model.kv_bytes_per_token(itemsize)) for name, f in default.items()}
    assert 1.5 * reads["paged-16"] < reads["reserved"] < reads["padded"]


def test_every_rival_serves_every_token(default):
    made = workload(200)
    for f in default.values():
        assert f.finished == f.requests == 200 and f.steps == f.model_steps
        assert f.emitted == sum(a.output_tokens for a in made)
        assert 0 < f.token_steps <= f.slot_steps <= SLOTS * f.model_steps
        block = int(f.name.removeprefix("paged-")) if f.name.startswith("paged-") else 1
        assert f.slot_steps + f.free_steps == f.model_steps * (SLOTS // block * block)
        if f.name != "padded":  # a last token is never computed
            assert f.computed - f.recomputed == sum(a.total_tokens - 1 for a in made)


# ---- any workload


@st.composite
def arrivals(draw):
    n = draw(st.integers(1, 8))
    made = []
    for i in range(n):
        prompt, output = draw(st.integers(1, 20)), draw(st.integers(1, 12))
        made.append(Arrival(f"r{i}", prompt, output, draw(st.sampled_from([0, 0, 1.5, 7, 40])), min(prompt, 5), "p"))
    return made


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(SCHEDULED[:6]), made=arrivals(), slots=st.integers(32, 80), budget=st.integers(8, 40))
def test_books_balance_after_every_step(name, made, slots, budget):
    allocator = allocator_for(name, slots, max_model_len=32, prefix_sharing=name == "paged-8")
    scheduler = scheduler_for(name, allocator, budget)
    run, tokens = Simulation(scheduler, made, vocab_size=50), 0
    for plan in run:
        tokens += sum(r.num_computed_tokens for r in scheduler.running)
        held = {r: allocator.pieces(r) for r in scheduler.running}
        for r, pieces in held.items():
            assert sum(n for _, n in pieces) == allocator.slots_held(r) >= r.num_computed_tokens > 0
        assert all(r.status is not Status.TOO_LONG for r, _ in plan)
        slots_named = [s for pieces in held.values() for start, n in pieces for s in range(start, start + n)]
        assert len(set(slots_named)) == allocator.slots_used == allocator.num_slots - allocator.slots_free
        if not getattr(allocator, "prefix_sharing", False):
            assert len(slots_named) == allocator.slots_used  # nobody holds another's slot
        if name in ("reserved", "doubling"):
            allocator.memory.check()
            assert all(b == a + n for pieces in held.values() for (a, n), (b, _) in zip(pieces, pieces[1:]))
            assert allocator.free_runs() == super(type(allocator).__base__, allocator).free_runs()
    assert allocator.slots_used == 0 and not scheduler.unfinished
    assert all(r.status is Status.LENGTH for r in scheduler.requests.values())
    assert scheduler.num_finished == len(made)
    series = scheduler.trace.series()
    assert series["tokens"].sum() == tokens
    found = simulate(
        name, made, slots, max_model_len=32, max_num_batched_tokens=budget, prefix_sharing=name == "paged-8"
    )
    if name != "paged-8":  # other token ids, other prefixes
        assert found.token_steps == tokens and found.utilization == scheduler.trace.utilization()
        assert found.computed == series["computed"].sum()


@given(made=arrivals(), slots=st.integers(32, 80), budget=st.integers(1, 40))
def test_padded_batches_against_a_drawing(made, slots, budget):
    """Each batch drawn as a list of columns, one list of marks a column: T a live token, . anything else."""
    waiting, clock, expected = sorted(made, key=lambda a: a.arrival), 0, []
    while waiting:
        clock = max(clock, math.ceil(waiting[0].arrival))
        batch = [a for a in waiting if a.arrival <= clock][: slots // 32]
        waiting = waiting[len(batch) :]
        longest = max(a.prompt_tokens for a in batch)
        columns = 0
        done = [0] * len(batch)
        while any(d < a.output_tokens for d, a in zip(done, batch)):
            new = min(max(1, budget // len(batch)), longest - columns) if columns < longest else 1
            columns += new
            live = [d < a.output_tokens for d, a in zip(done, batch)]
            marks = [
                sum(c >= longest - a.prompt_tokens for c in range(columns)) for a, alive in zip(batch, live) if alive
            ]
            if columns >= longest:
                done = [d + alive for d, alive in zip(done, live)]
            expected.append((clock, len(batch), sum(live), len(batch) * columns, sum(marks), len(batch) * new))
            clock += 1
    found = list(padded_batches(made, slots, 32, budget))
    assert [(s.step, s.rows, s.live, s.slots, s.tokens, s.computed) for s in found] == expected
    assert sum(s.emitted for s in found) == sum(a.output_tokens for a in made)
    assert sum(s.ended for s in found) == len(made)


def test_the_queue_is_not_searched():
    """Ten thousand that wait must not make a step dearer: how often the allocator is asked, a step."""
    asked = {}
    for n in (50, 400):
        allocator = allocator_for("paged-16", 512)
        scheduler = scheduler_for("paged-16", allocator)
        calls = []
        for method in ("grow", "admit"):
            counted = partial(_counted, getattr(allocator, method), calls)
            setattr(allocator, method, counted)
        run = Simulation(scheduler, workload(n, max_model_len=128, output_median=16), keep_trace=False)
        computed = sum(len(plan) for plan in run)
        asked[n] = len(calls) / computed
        assert scheduler.trace.events == []
    assert asked[400] < 1.2 * asked[50] < 3


def _counted(real, calls, *args):
    calls.append(real)
    return real(*args)


# ---- one idea each


def test_a_lone_request_may_slide_down_over_its_own_range():
    allocator = allocator_for("doubling", 16, max_model_len=16)
    scheduler = scheduler_for("doubling", allocator)
    a, b = (scheduler.add(Request([0] * 3, n, stop_ids=[])) for n in (2, 10))
    while scheduler.unfinished:
        for request, _ in scheduler.schedule():
            for ready in scheduler.computed(request):
                scheduler.append(ready, 0)
        if a.finished and not b.finished:
            assert sum(n for _, n in allocator.pieces(b)) >= b.num_computed_tokens
        scheduler.end_step()
    assert (a.status, b.status) == (Status.LENGTH, Status.LENGTH)
    assert allocator.moved_tokens and not scheduler.num_preemptions


def test_a_range_grows_in_place_if_it_can_and_moves_if_it_must():
    allocator = allocator_for("doubling", 32, max_model_len=16)
    scheduler_for("doubling", allocator)  # gives it a trace
    a, b = Request([0] * 4), Request([0] * 4)
    assert allocator.grow(a, 4) and allocator.pieces(a) == [(0, 4)]
    assert allocator.grow(a, 5) and allocator.pieces(a) == [(0, 4), (4, 4)]
    assert allocator.grow(b, 3) and allocator.pieces(b) == [(8, 4)]
    a.num_computed_tokens = 8
    assert allocator.grow(a, 9) and allocator.pieces(a) == [(12, 16)] and allocator.moved_tokens == 8
    assert allocator.free_runs() == [(0, 8), (28, 4)] and allocator.external_fragmentation == pytest.approx(1 / 3)
    c = Request([0] * 9)
    assert not allocator.grow(c, 9) and allocator.failures == 1 and allocator.gap_failures == 0  # 12 of 16 are free
    assert not allocator.grow(a, 17) and allocator.pieces(a) == [(12, 16)]  # more than max_model_len


def test_static_batches_wait_for_their_last_request():
    """One long request and three short ones, with room for two at max_model_len: counted by hand."""
    made = [Arrival("long", 4, 10), Arrival("a", 4, 2), Arrival("b", 4, 2), Arrival("c", 4, 2)]
    options = {"max_model_len": 16, "max_num_batched_tokens": 16}
    steps = {name: simulate(name, made, 32, **options).model_steps for name in ("padded", "reserved", "packed")}
    assert steps == {"padded": 12, "reserved": 10, "packed": 10}
    assert simulate("packed", [*made, *(Arrival(f"x{i}", 8, 2) for i in range(3))], 32, **options).model_steps == 12


def test_steps_without_anybody_pass_on_the_clock_alone():
    made = [Arrival("a", 4, 3), Arrival("b", 4, 3, 99.5)]
    for name in RIVALS:
        f = simulate(name, made, 1024)
        assert (f.steps, f.model_steps, f.peak_requests, f.mean_requests, f.waited) == (103, 6, 1, 1, 0), name


def test_waiting_is_counted_to_the_first_new_token():
    """One at a time, 3 steps each: a at 0, b at 1, c at 20. b waits for step 3."""
    made = [Arrival("a", 4, 3), Arrival("b", 4, 3, 0.5), Arrival("c", 4, 3, 20)]
    for name in ("padded", "reserved"):
        f = simulate(name, made, 16, max_model_len=16)
        assert (f.waited, f.mean_wait, f.steps) == (2, 2 / 3, 23), name
    chunked = simulate("padded", made, 16, max_model_len=16, max_num_batched_tokens=2)  # 2 steps to the first token
    assert chunked.waited == simulate("reserved", made, 16, max_model_len=16, max_num_batched_tokens=2).waited == 6


def test_a_shared_prompt_is_computed_and_held_once():
    made = workload(40, shared_prefix=256)
    plain = simulate("paged-16", made, SLOTS)
    shared = simulate("paged-16", made, SLOTS, prefix_sharing=True)
    assert plain.cached == 0 and shared.cached > 30 * 256
    assert shared.model_steps < plain.model_steps and shared.mean_requests > plain.mean_requests
    assert shared.utilization > 1 > plain.utilization
    assert shared.emitted == plain.emitted


def test_a_memory_too_small_for_anybody_serves_nobody_and_one_too_small_for_some_the_others():
    made = [Arrival("small", 10, 10), Arrival("large", 100, 10)]
    found = {f.name: f for f in compare(made, 64, ["padded", "reserved", "doubling", "paged-16"], max_model_len=128)}
    assert {name: f.finished for name, f in found.items()} == {"padded": 0, "reserved": 0, "doubling": 1, "paged-16": 1}


def test_latent_flops_are_not_guessed():
    latent = ModelConfig(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    with pytest.raises(ValueError, match="kv_lora_rank=16: latent attention's FLOPs do not follow"):
        simulate("paged-16", [Arrival("a", 10, 10)], 64).flops(latent)


def test_ended_requests_are_told_as_they_end():
    for name in RIVALS:
        told = []
        simulate(name, workload(12, max_model_len=100), 256, max_model_len=100, on_finished=told.append)
        assert sum(told) == 12 and len([n for n in told if n]) > 2


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("pagd", {}, "rival 'pagd' is not known; rivals are padded, packed"),
        ("paged-0", {}, "rival 'paged-0' is not known"),
        ("paged-64", {}, "paged-64: 32 slots are less than one block"),
        ("reserved", {"max_model_len": 16}, "request a has 20 tokens, more than max_model_len=16"),
        ("padded", {"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be at least 1"),
    ],
)
def test_bad_input_is_named(name, options, says):
    with pytest.raises(ValueError, match=says):
        simulate(name, [Arrival("a", 10, 10)], 32, **options)
    if "rival" in says:
        with pytest.raises(ValueError, match=says):
            compare([Arrival("a", 10, 10)], 32, ["padded", name])


# ---- the simulation against the engine


CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def test_a_padded_batch_is_what_generate_does_with_a_list():
    """Of equal outputs, for generate() takes one max_new_tokens for all rows."""
    model, made = GPT(CONFIG, seed=0), [Arrival(f"r{n}", n, 6) for n in (5, 12, 9)]
    with count_flops(model) as counted:
        out = generate(model, [prompt_ids(a, 64) for a in made], 6, "full", prefill_chunk=4)
    found = simulate("padded", made, 3 * 32, max_model_len=32, max_num_batched_tokens=12)
    predicted = found.flops(CONFIG)
    assert (predicted.projections, predicted.attention) == (counted.projections, counted.attention)
    assert found.emitted == sum(map(len, out)) - sum(a.prompt_tokens for a in made)
    assert found.model_steps == 3 + 5


def test_the_engine_takes_the_same_steps_and_the_counted_flops():
    """What is simulated is what a model does: steps, tokens, and FLOPs to the last one."""
    config, model = CONFIG, GPT(CONFIG, seed=0)
    made = workload(10, prompt_median=12, output_median=12, max_model_len=64, rate=0.5)
    engine = Engine(model, 10, 8, max_num_batched_tokens=24, prefix_sharing=False, headroom=0)
    feed = Feed(engine, made, config.vocab_size)
    with count_flops(model) as counted:
        while feed.add_due():
            engine.step()
    found = simulate("paged-8", made, 80, max_model_len=64, max_num_batched_tokens=24)
    assert found.preemptions == engine.scheduler.num_preemptions > 0
    assert (found.steps, found.model_steps) == (feed.clock, engine.trace.step)
    assert found.utilization == engine.trace.utilization()
    predicted = found.flops(config)
    assert (predicted.projections, predicted.attention) == (counted.projections, counted.attention)
