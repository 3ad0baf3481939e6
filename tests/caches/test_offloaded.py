"""OffloadedCache between two devices: equal to the full cache, every byte that crosses counted, nothing seen early."""

import contextlib

import pytest
import torch
from cases import stored_tensors
from oracles import assert_equals_oracle, assert_logits, call, dense_logits, feed, ids_for, in_chunks, rule_of, toy
from two_devices import TwoDevices

from kvlab.caches import OffloadedCache, make_cache, offloaded
from kvlab.measure import memory

MODEL = toy(num_hidden_layers=4)
ONE = 2 * 2 * 8 * 8  # K and V, heads, head_dim, bytes: a token in a layer
SCHEDULES = {
    "rows alike": ([13, 13], [[7, 7], [1, 1], [5, 5]]),
    "ragged": ([13, 9], [[7, 2], [1, 0], [1, 1], [4, 6]]),
    "one by one": ([9, 9], [[1, 1]] * 9),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


@every_schedule
@pytest.mark.parametrize("ahead", [True, False])
def test_the_same_to_the_bit_as_a_full_cache(name, ahead):
    lengths, schedule = SCHEDULES[name]
    rows = ids_for(0, lengths)
    want = feed(MODEL, make_cache("full", MODEL, 2, 20), rows, schedule)
    for cache in (make_cache("offloaded", MODEL, 2, 20), TwoDevices(2, 20, ahead=ahead)):
        for a, b in zip(feed(MODEL, cache, rows, schedule), want):
            assert torch.equal(a, b)


@every_schedule
@pytest.mark.parametrize("ahead", [True, False])
def test_bytes_moved_are_those_that_cross(name, ahead):
    """Per layer and step B*S*one over and N*one home; the counter, the closed form and the copies themselves agree."""
    lengths, schedule = SCHEDULES[name]
    cache = TwoDevices(2, 20, ahead=ahead)
    feed(MODEL, cache, ids_for(0, lengths), schedule)
    done, over = [0, 0], 0
    for counts in schedule:
        over += 4 * 2 * max(done) * ONE
        done = [d + n for d, n in zip(done, counts)]
    home = 4 * sum(done) * ONE
    assert cache.crossed == {"over": over, "home": home}
    assert cache.bytes_moved == over + home and cache.bytes_copied == over
    assert cache.nbytes == 4 * 2 * 20 * ONE and cache.nbytes_in_use == home
    longest = max(done)
    assert cache.temporary_peak == (2 if ahead else 1) * 2 * longest * ONE


def test_nothing_crosses_where_there_is_one_device():
    cache = make_cache("offloaded", MODEL, 1, 20)
    assert cache.where() == "keys and values will be kept on cpu" and cache.nbytes_on() == {"cpu": 0}
    feed(MODEL, cache, ids_for(1, [9]), [[8], [1]])
    assert cache.bytes_moved == cache.bytes_copied == cache.temporary_peak == 0
    assert cache.nbytes_on() == {"cpu": cache.nbytes} == {"cpu": 4 * 20 * ONE}
    assert cache.where().endswith("where the model computes: nothing is moved or saved")


def test_where_says_what_another_device_holds():
    for ahead, words in ((True, "two of 4 layers"), (False, "one of 4 layers")):
        cache = TwoDevices(1, 20, ahead=ahead)
        feed(MODEL, cache, ids_for(1, [9]), [[9]])
        assert words in cache.where()


def test_attention_never_sees_the_home_and_the_home_never_the_model():
    """What the model gets and gives shares no memory with what is kept: on two devices it could not."""
    cache, seen = TwoDevices(1, 20), []
    append = cache.append

    def watched(layer, k, v, pos):
        view = append(layer, k, v, pos)
        seen.extend((k, v, view.k, view.v))
        return view

    cache.append = watched
    feed(MODEL, cache, ids_for(2, [9]), [[4], [1], [4]])
    homes = {x.untyped_storage().data_ptr() for held in (cache.k, cache.v) for x in held.values()}
    assert len(homes) == 8 and not homes & {x.untyped_storage().data_ptr() for x in seen}


@pytest.mark.parametrize("ahead", [True, False])
def test_temporaries_are_gone_after_the_step_and_no_more_than_two_at_once(ahead):
    """Weighed: a decode step over S tokens holds one layer of them for a moment, or two, of eight; then none."""
    model, S = toy(num_hidden_layers=8, dtype=torch.float32, num_key_value_heads=4), 192
    one = 2 * 4 * 8 * 4
    peaks = {}
    for n in (64, S):
        cache = TwoDevices(1, S + 8, ahead=ahead)
        feed(model, cache, ids_for(3, [n]), [[n]])
        held = sum(x.untyped_storage().nbytes() for x in stored_tensors(cache) if x.is_floating_point())
        assert held == cache.nbytes and not cache._coming
        with memory("cpu", of=[cache], counted=True) as m:
            call(model, cache, [[1]], [n])
        peaks[n] = m.peak - m.live
    layers = (peaks[S] - peaks[64]) / ((S - 64) * one)
    assert (1.9 if ahead else 0.9) < layers < (2.6 if ahead else 1.6)


# ---- rows, and steps that fail


def test_reorder_rewind_and_fork():
    rows = ids_for(4, [9, 6])
    cache = TwoDevices(2, 20)
    feed(MODEL, cache, rows, [[9, 6]])
    cache.reorder([1, 0, 1])
    cache.rewind([1, 0, 2])
    texts = [rows[1][:5], rows[0], rows[1][:4]]
    twin = cache.fork()
    before = {layer: x.clone() for layer, x in cache.k.items()}
    got = call(MODEL, twin, [[1, 2], [3], [4]], [5, 9, 4])
    for b, new in enumerate(([1, 2], [3], [4])):
        assert_logits(got[b], dense_logits(MODEL, texts[b] + new)[len(texts[b]) :], what=f"row {b}")
    assert all(torch.equal(before[layer], x) for layer, x in cache.k.items())
    got = call(MODEL, cache, [[5], [6, 7], [8]], [5, 9, 4])
    for b, new in enumerate(([5], [6, 7], [8])):
        assert_logits(got[b], dense_logits(MODEL, texts[b] + new)[len(texts[b]) :], what=f"row {b}")
    for one in (cache, twin):  # tokens first in memory, so that those held are one block
        assert all(x.permute(2, 0, 1, 3).is_contiguous() for x in one.k.values())


@pytest.mark.parametrize("layer", range(4))
def test_a_step_that_fails_between_two_layers(layer):
    """The layer that was brought ahead is not taken for the next step's."""
    fail_at(layer)


def test_a_planted_bug_fails_that_check(monkeypatch):
    monkeypatch.setattr(OffloadedCache, "_undo", lambda self, step: None)
    with pytest.raises((AssertionError, RuntimeError)):
        fail_at(1)


def fail_at(layer: int) -> None:
    text = ids_for(5, [9])[0]
    cache = TwoDevices(1, 20)
    feed(MODEL, cache, [text], [[9]])
    block = MODEL.layers[layer].mlp

    def out_of_memory(x):
        raise RuntimeError("out of memory")

    block.forward = out_of_memory
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            call(MODEL, cache, [[1, 2]], [9])
    finally:
        del block.forward
    assert cache.lengths == [9] and not cache._coming
    assert_logits(call(MODEL, cache, [[3]], [9])[0], dense_logits(MODEL, text + [3])[9:])


def test_a_follower_uses_what_was_brought_for_its_owner():
    model = toy(num_hidden_layers=4, kv_owner=(0, 1, 1, 0))
    cache = TwoDevices(1, 20)
    assert_equals_oracle(model, cache, ids_for(6, [11]), in_chunks([11], 3), rule_of("offloaded", {}))
    assert cache.crossed["home"] == 2 * 11 * ONE


# ---- a second stream, as late as it may be


class LateStream:
    """Copies stand in a queue until somebody waits for them. So does CUDA in the worst case; a missing wait shows."""

    def __init__(self):
        self.queue, self.done, self.events = [], 0, []

    def record_event(self):
        self.events.append(len(self.queue))
        return len(self.events) - 1

    def wait_event(self, event):
        self.run(self.events[event])

    def run(self, upto):
        while self.done < upto:
            to, what = self.queue[self.done]
            to.copy_(what)
            self.done += 1


class LateCopies(TwoDevices):
    stream = LateStream()

    def _copy(self, to, what, wait=False):
        if wait:
            return super()._copy(to, what, wait)
        self.stream.queue.append((to, what))

    def _settle(self):
        self.stream.run(len(self.stream.queue))


@pytest.fixture
def late(monkeypatch):
    stream = LateCopies.stream = LateStream()
    monkeypatch.setattr(offloaded, "copying", lambda device: contextlib.nullcontext(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return stream


def late_text() -> None:
    """Steps of all sorts, a fork, rows in another order: all with copies that come as late as they may."""
    rows = ids_for(8, [9, 9])
    cache = LateCopies(2, 20)
    got = feed(MODEL, cache, rows, [[4, 4], [1, 1], [1, 1], [3, 3]])
    for b, row in enumerate(rows):
        assert_logits(got[b], dense_logits(MODEL, row), what=f"row {b}")
    twin = cache.fork()
    cache.reorder([1, 0])
    for one, texts in ((twin, rows), (cache, rows[::-1])):
        for new in ([[1], [2, 3]], [[4], [5]]):  # rows of unequal length from here on
            got = call(MODEL, one, new, [len(t) for t in texts])
            texts = [text + more for text, more in zip(texts, new)]
            for b, text in enumerate(texts):
                assert_logits(got[b], dense_logits(MODEL, text)[-len(new[b]) :], what=f"after, row {b}")


def test_copies_that_come_as_late_as_they_may(late):
    late_text()
    assert late.done > 50  # something was late


@pytest.mark.parametrize("bug", ["nobody waits for what is fetched", "nobody waits before rows move"])
def test_a_missing_wait_fails_the_check(bug, late, monkeypatch):
    if "rows" in bug:
        monkeypatch.setattr(LateCopies, "_settle", lambda self: None)
    else:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: LateStream())
        monkeypatch.setattr(LateStream, "wait_event", lambda self, event: None)
    with pytest.raises(AssertionError):
        late_text()


def test_copies_beside_the_computation_wait_for_what_was_asked_before(monkeypatch):
    """The order of calls to CUDA, written down by stand-ins: wait, then copy, each on the copies' own stream."""
    said = []

    class Stream:
        def wait_stream(self, other):
            said.append(("waits for", other))

    mine = Stream()
    monkeypatch.setattr(offloaded, "copy_stream", lambda device: mine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the computation")

    @contextlib.contextmanager
    def on(stream):
        said.append(("on", stream))
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    with offloaded.copying(torch.device("cuda:0")) as stream:
        said.append("copies")
    assert stream is mine and said == [("waits for", "the computation"), ("on", mine), "copies"]
    with offloaded.copying(torch.device("cpu")) as stream:
        assert stream is None


# ---- refusals


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", "meta", 3.5, ""])
def test_homes_that_are_not_there(device):
    with pytest.raises(ValueError, match="device=.* (is not there|keeps no values).*'cpu'"):
        make_cache("offloaded", MODEL, 1, 8, device=device)


# ---- planted bugs


def sends_nothing(self, layer, K, V, step):
    pass


def fetches_one_less(self, layer, step, device, fetch=OffloadedCache._fetch):
    fetch(self, layer, step, device)
    K, V, arrived = self._coming[layer]
    if max(step.start):
        V[:, :, max(step.start) - 1] = 0


def another_layer(self, layer, step, device, fetch=OffloadedCache._fetch):
    fetch(self, layer, step, device)
    if layer == 2 and 1 in self.k:
        K, V, arrived = self._coming[2]
        S = max(step.start)
        V[:, :, :S] = self.v[1][:, :, :S]


BUGS = {
    "new tokens are not sent home": ("_send", sends_nothing),
    "the newest old value is not brought": ("_fetch", fetches_one_less),
    "another layer's values are brought": ("_fetch", another_layer),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_check(bug, monkeypatch):
    monkeypatch.setattr(OffloadedCache, *BUGS[bug])
    with pytest.raises(AssertionError):
        assert_equals_oracle(
            MODEL, TwoDevices(2, 20), ids_for(7, [13, 9]), [[7, 2], [1, 0], [1, 1], [4, 6]], rule_of("full", {})
        )
