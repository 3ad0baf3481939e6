"""The engine on a small GPT: what it computes, what it costs, and what happens when something goes wrong."""

import pytest
import torch
from books import Watch, check_alone, check_books, check_empty, record_logits
from oracles import ids_for, toy

from kvlab import generate
from kvlab.caches import BlockPool
from kvlab.measure import count_flops
from kvlab.serving import Engine, Request, Status
from kvlab.serving.bookkeeping import bookkeeping

MODEL = toy(seed=12)


def engine(num_blocks=40, block_size=4, model=MODEL, **options) -> Engine:
    return Engine(model, num_blocks, block_size, **options)


def run(e: Engine) -> None:
    while e.unfinished:
        e.step()
        check_books(e.scheduler)
    check_empty(e.scheduler)


# ---- what it computes


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 2.0, "top_k": 7, "top_p": 0.8}]
)
def test_a_batch_of_samples_is_what_generate_gives(sampling):
    prompt = ids_for(0, [9])[0]
    sampling = {"seed": 1, **sampling}
    e = engine()
    r = e.add(prompt, 8, n=3, stop_ids=[], **sampling)
    run(e)
    assert [s.ids for s in r.samples] == generate(MODEL, [prompt] * 3, 8, stop_ids=[], **sampling)
    assert [s.id for s in r.samples] == [0, "0/1", "0/2"]


def test_a_request_does_not_depend_on_its_neighbours():
    prompts = ids_for(1, [5, 11, 3, 8])
    texts = []
    for others in (prompts[1:], prompts[2:], []):
        e = engine()
        r = e.add(prompts[0], 10, temperature=1.0, seed=5, stop_ids=[])
        for other in others:
            e.add(other, 6, temperature=1.0, seed=5)
        logits = record_logits(e)
        run(e)
        check_alone(MODEL, r, logits[r])
        texts.append(r.output)
    assert texts[0] == texts[1] == texts[2]


def test_without_a_seed_every_request_draws_its_own():
    e = engine()
    requests = [e.add([1, 2, 3], 12, temperature=3.0, stop_ids=[]) for _ in range(3)]
    run(e)
    assert len({tuple(r.output) for r in requests}) == 3


def test_preemption_keeps_the_sampler_going():
    """A tight pool and a roomy one give the same texts, drawn with the same seeds."""
    texts = {}
    for blocks in (6, 40):
        e = engine(blocks, 2, headroom=0, prefix_sharing=blocks == 6)
        rs = [e.add(p, 7, temperature=1.2, seed=i, stop_ids=[]) for i, p in enumerate(ids_for(2, [4, 3, 5]))]
        run(e)
        texts[blocks] = [r.output for r in rs]
        assert (e.scheduler.num_preemptions > 0) == (blocks == 6)
    assert texts[6] == texts[40]


def test_the_models_own_end_ids_stop_a_request():
    prompt = ids_for(3, [6])[0]
    text = generate(MODEL, prompt, 9, stop_ids=[])[6:]
    model = toy(seed=12, eos_token_id=text[4])
    e = engine(model=model)
    r, own = e.add(prompt, 9), e.add(prompt, 9, stop_ids=text[2])
    run(e)
    stop = text.index(text[4]) + 1
    assert r.output == text[:stop] and r.status is Status.STOPPED
    assert own.output == text[: text.index(text[2]) + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    e = engine(6, 2, model=toy(seed=12, dtype=dtype))
    rs = [e.add(p, 5, stop_ids=[]) for p in ids_for(4, [4, 3])]
    run(e)
    assert [len(r.output) for r in rs] == [5, 5] and e.pool.k[0].dtype == dtype


def test_new_tokens_come_from_step_and_callbacks_in_the_same_order():
    heard, stepped = [], []
    e = engine(max_num_batched_tokens=6)
    for i, p in enumerate(ids_for(5, [4, 9])):
        e.add(p, 3, i, n=2, on_token=lambda r, t: heard.append((r.id, t)))
    while e.unfinished:
        stepped += [(r.id, t) for r, t in e.step()]
    assert heard == stepped and len(heard) == 12
    for r in e.scheduler.requests.values():
        assert [t for id, t in heard if id == r.id] == r.output


def test_steps_one_by_one():
    e = engine()
    e.add([1, 2], 5, stop_ids=[])
    e.run(2)
    assert e.unfinished and e.trace.step == 2
    e.run()
    assert e.trace.step == 5 and e.step() == []
    with pytest.raises(ValueError, match="max_steps=0 must be at least 1"):
        e.run(0)


# ---- what it costs


def fed(monkeypatch) -> list[tuple[int, int]]:
    """(rows, columns) of every forward pass from now on."""
    shapes, forward = [], MODEL.run
    monkeypatch.setattr(MODEL, "run", lambda ids, *args: shapes.append(tuple(ids.shape)) or forward(ids, *args))
    return shapes


def test_decodes_run_together_and_nothing_is_padded(monkeypatch):
    shapes = fed(monkeypatch)
    e = engine(max_num_batched_tokens=20)
    for p in ids_for(6, [5, 5, 3]):
        e.add(p, 9, stop_ids=[])
    e.step()
    assert shapes == [(1, 3), (2, 5)]  # chunks of equal length together
    e.add(ids_for(7, [30])[0], 3, stop_ids=[])
    del shapes[:]
    e.step()
    assert shapes == [(3, 1), (1, 17)]  # three decodes, and what is left of 20 tokens
    del shapes[:]
    run(e)
    assert sum(rows * columns for rows, columns in shapes) == e.trace.series()["computed"][2:].sum()


def test_a_mixed_step_costs_what_its_tokens_cost():
    """Three decodes and a chunk of 17: projections of 20 tokens. Padded to one another they would be of 4 * 17."""
    e = engine(max_num_batched_tokens=20)
    for p in ids_for(6, [5, 5, 3]):
        e.add(p, 9, stop_ids=[])
    e.step()
    e.add(ids_for(7, [30])[0], 3, stop_ids=[])
    with count_flops(MODEL) as f:
        e.step()
    with torch.no_grad(), count_flops(MODEL) as one:
        MODEL(torch.tensor([[1]]))
    head = 2 * MODEL.config.vocab_size * MODEL.config.hidden_size
    layers = one.projections - head
    assert f.projections == 20 * layers + 4 * head  # one row of logits a request


def test_a_shared_prompt_is_computed_once():
    system = ids_for(8, [16])[0]
    e = engine(block_size=4)
    rs = [e.add(system + p, 3, stop_ids=[]) for p in ids_for(9, [3, 2, 5])]
    e.step()  # all three at once: nobody is there to share with
    rs += [e.add(system + p, 3, stop_ids=[]) for p in ids_for(10, [4, 1])]
    run(e)
    assert [r.num_cached_tokens for r in rs] == [0, 0, 0, 16, 16]
    assert e.trace.series()["computed"].sum() == sum(r.num_tokens - 1 for r in rs) - 32


def test_samples_cost_their_prompt_once_and_one_block_each():
    e = engine(block_size=4)
    r = e.add(ids_for(11, [10])[0], 4, n=3, stop_ids=[])
    e.step()
    assert e.pool.used_blocks == 3 and len(e.scheduler.running) == 3
    copied = e.bytes_copied
    e.step()
    assert e.pool.used_blocks == 5  # the partly filled block is copied for all but the last
    gathered = 3 * 3 * e.pool.block_bytes
    assert e.bytes_copied - copied == gathered + 2 * e.pool.block_bytes
    assert [(x.request, x.kind) for x in e.trace.events if x.kind == "copied"] == [(0, "copied"), ("0/1", "copied")]
    assert e.trace.series()["computed"].tolist() == [10, 3]
    run(e)
    assert len({s.status for s in r.samples}) == 1


def test_a_pool_outlives_its_engine():
    pool, text = BlockPool(20, 4), ids_for(12, [13])[0]
    outputs = []
    for found in (0, 12):
        e = Engine(MODEL, pool=pool)
        r = e.add(text, 5, stop_ids=[])
        logits = record_logits(e)
        run(e)
        check_alone(MODEL, r, logits[r])
        assert r.num_cached_tokens == found
        outputs.append(r.output)
    assert outputs[0] == outputs[1]


def test_the_bookkeeping_is_measured():
    e = engine()
    e.add([1, 2, 3], 4)
    e.run()
    assert set(e.seconds) == {"schedule", "model", "sample"} and min(e.seconds.values()) > 0
    b = bookkeeping(MODEL, num_seqs=3, context=5, steps=4)
    assert 0 < b.schedule_seconds < b.step_seconds and 0 < b.share < 1
    assert str(b).startswith("3 requests of 5 tokens, median of 4 decode steps: ")
    for name in ("steps", "block_size"):
        with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
            bookkeeping(MODEL, **{name: 0})


# ---- what goes wrong


@pytest.mark.parametrize("at", [0, 1, 2, 5])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_model_that_raises_once_costs_a_step_and_nothing_else(at, layer, monkeypatch):
    e = engine(10, 4, max_num_batched_tokens=7)
    logits, watch = record_logits(e), Watch(e.scheduler)
    rs = [e.add(p, 5, temperature=1.0, seed=i, n=1 + i % 2, stop_ids=[]) for i, p in enumerate(ids_for(13, [9, 4, 6]))]
    calls, block = [], MODEL.layers[layer]
    forward = block.forward

    def failing(x, now):
        calls.append(len(calls))
        if calls[-1] == at:
            raise MemoryError("out of memory")
        return forward(x, now)

    monkeypatch.setattr(block, "forward", failing)
    failed = 0
    while e.unfinished:
        try:
            e.step()
        except MemoryError:
            failed += 1
        check_books(e.scheduler)
    monkeypatch.undo()
    assert failed == 1
    check_empty(e.scheduler)
    watch.check()
    for r in rs:
        for s in r.samples:
            check_alone(MODEL, s, logits[s])


@pytest.mark.parametrize("where", ["head", "choice"])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_an_interrupt_behind_the_layers_costs_a_step_and_nothing_else(at, where, monkeypatch):
    """Memory that runs out for the logits; Ctrl-C before a token is chosen, when the rows have moved on already."""
    e = engine(10, 4, max_num_batched_tokens=7)
    logits, watch = record_logits(e), Watch(e.scheduler)
    rs = [e.add(p, 5, n=1 + i % 2, stop_ids=[]) for i, p in enumerate(ids_for(13, [9, 4, 6]))]
    target, name = (MODEL.lm_head, "forward") if where == "head" else (e, "choose")
    f, calls = getattr(target, name), []

    def failing(*args):
        calls.append(1)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return f(*args)

    monkeypatch.setattr(target, name, failing)
    failed = 0
    for _ in range(60):
        try:
            e.run()
        except KeyboardInterrupt:
            failed += 1
        check_books(e.scheduler)
        if not e.unfinished:
            break
    assert failed == 1
    check_empty(e.scheduler)
    watch.check()
    for r in rs:
        for s in r.samples:
            check_alone(MODEL, s, logits[s])


def test_a_request_that_went_wrong_does_not_poison_the_others():
    """Token 7 has an embedding of NaN. Who draws from such logits fails alone, and its blocks serve others again."""
    model = toy(seed=9)
    with torch.no_grad():
        kept = model.embed_tokens.weight[7].clone()
        model.embed_tokens.weight[7] = float("nan")
    try:
        e = engine(7, 4, model=model, max_num_batched_tokens=64)
        logits = record_logits(e)
        good = [e.add(p, 6, temperature=0.5, seed=1, stop_ids=[]) for p in ([1, 2, 3], [4, 5, 6, 8, 9])]
        bad = e.add([1, 7, 3, 4, 5], 6, temperature=0.5, seed=1, n=2, stop_ids=[])
        late = e.add([9, 8, 1, 2, 3, 4, 5, 6, 8, 9], 6, stop_ids=[])
        run(e)
        assert [s.status for s in bad.samples] == [Status.FAILED] * 2
        assert bad.reason.startswith("sampling raised RuntimeError: ") and bad.output == []
        for r in (*good, late):
            if 7 not in r.output:
                check_alone(model, r, logits[r])
        assert sum(r.status is Status.LENGTH for r in (*good, late)) >= 2
    finally:
        with torch.no_grad():
            model.embed_tokens.weight[7] = kept


def test_bad_input_is_refused_and_changes_nothing():
    with pytest.raises(TypeError, match="pool is a list, not a BlockPool"):
        Engine(MODEL, pool=[1, 2])
    e = engine(max_num_seqs=4)
    e.add([1, 2], 9, "a", stop_ids=[])
    e.step()
    before = dict(e.scheduler.requests), len(e.trace.events), e.scheduler.requests["a"].sampler
    for prompt, options, error, said in (
        ([1, 50], {}, ValueError, "contains id 50, outside the vocabulary: ids run from 0 to 49"),
        ([1, 2.5], {}, TypeError, "contains 2.5: token ids are ints"),
        ([], {}, ValueError, "prompt is empty"),
        ("hello", {}, TypeError, "encode text first"),
        ([1], {"max_tokens": 0}, ValueError, "max_tokens=0 must be at least 1"),
        ([1], {"temperature": -1.0}, ValueError, "temperature=-1.0 must be 0"),
        ([1], {"top_p": 0}, ValueError, r"top_p=0 must lie in \(0, 1\]"),
        ([1], {"stop_ids": [60]}, ValueError, "stop id 60 can never come"),
        ([1], {"id": "a"}, ValueError, "request id 'a' is in use already"),
        ([1], {"n": 5}, ValueError, "n=5 samples cannot run together: max_num_seqs=4"),
        (e.scheduler.requests["a"], {}, ValueError, "was added before"),
        (Request([1]), {"temperature": 1.0}, ValueError, "options beside a Request, which has its own: temperature"),
        (Request([1]), {"id": "b"}, ValueError, "options beside a Request, which has its own: id"),
    ):
        with pytest.raises(error, match=said):
            e.add(prompt, **options)
        assert (dict(e.scheduler.requests), len(e.trace.events), e.scheduler.requests["a"].sampler) == before
    run(e)


def test_faults_of_one_request_leave_the_others_tokens_as_they_are():
    """Too long, cancelled, a callback that fails, a pool run dry in prompts and in decodes: all in one workload."""

    def fail(r, token):
        raise ConnectionError("gone")

    e = engine(7, 2, max_num_batched_tokens=5, headroom=0)
    logits, p = record_logits(e), ids_for(14, [6, 20, 3, 5, 4, 7])
    options = {"temperature": 1.0, "seed": 4, "stop_ids": []}
    good = [e.add(p[0], 5, "a", **options)]
    too_long, failing = e.add(p[1], 5, "long", **options), e.add(p[2], 5, "fails", on_token=fail, **options)
    good.append(e.add(p[3], 5, "b", **options))
    outgrows, cancelled = e.add(p[4], 60, "outgrows", **options), e.add(p[5], 5, "cancelled", **options)
    e.run(4)
    e.cancel("cancelled")
    run(e)
    assert {r.id: str(r.status) for r in (too_long, failing, outgrows, cancelled)} == {
        "long": "too long",
        "fails": "failed",
        "outgrows": "too long",
        "cancelled": "cancelled",
    }
    assert failing.reason == "on_token raised ConnectionError: gone" and len(failing.output) == 1
    assert outgrows.reason == "its 15 tokens do not fit in 14 slots" and len(outgrows.output) == 11
    for r in (*good, failing, outgrows):
        check_alone(MODEL, r, logits[r])
    assert [r.status for r in good] == [Status.LENGTH] * 2 and e.scheduler.num_preemptions > 0


def test_a_request_made_beforehand():
    e = engine()
    r = Request([1, 2, 3], 4, "mine", stop_ids=[])
    assert e.add(r) is r and repr(r) == "Request('mine': 3 + 0 tokens, 0 computed, waiting)"
    run(e)
    assert repr(r) == "Request('mine': 3 + 4 tokens, 6 computed, length)"
