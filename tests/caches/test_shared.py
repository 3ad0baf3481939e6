"""SharedLayersCache beyond the generated cases: maps, reads, followers that hold nothing, and planted bugs."""

import pytest
import torch
from cases import check_fork, stored_tensors
from oracles import (
    Rule,
    assert_equals_oracle,
    assert_logits,
    call,
    dense_logits,
    feed,
    ids_for,
    in_chunks,
    rule_of,
    toy,
)

from kvlab.caches import FullCache, SharedLayersCache, make_cache

MODEL = toy(num_hidden_layers=5)
MAPS = [(0, 0, 2, 2, 4), (0, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 1, 2, 1, 0), (0, 1, 2, 3, 4)]


def hold(options: dict) -> None:
    lengths = [15, 9]
    for chunk in (15, 4, 1):
        cache = make_cache("shared", MODEL, 2, 20, **options)
        assert_equals_oracle(MODEL, cache, ids_for(1, lengths), in_chunks(lengths, chunk), rule_of("shared", options))


@pytest.mark.parametrize("owners", MAPS, ids=str)
def test_equals_the_dense_model_with_the_owners_keys_and_values(owners):
    hold({"owners": owners})


@pytest.mark.parametrize("every", [1, 2, 3, 5, 9])
def test_groups_of_layers_follow_their_first(every):
    hold({"every": every})
    cache = make_cache("shared", MODEL, 1, 8, every=every)
    assert [cache.owner(i) for i in range(5)] == [i // every * every for i in range(5)]


def test_the_default_is_pairs():
    assert make_cache("shared", MODEL, 1, 8).every == 2


def test_sharing_with_oneself_is_a_full_cache_and_with_another_is_not():
    text, exact = ids_for(2, [12])[0], Rule()
    for owners, same in (((0, 1, 2, 3, 4), True), ((0, 1, 2, 3, 3), False)):
        got = feed(MODEL, make_cache("shared", MODEL, 1, 12, owners=owners), [text], [[12]])[0]
        off = (got - dense_logits(MODEL, text, exact)).abs().max()
        assert (off < 1e-12) == same and (same or off > 1e-2)


def test_a_model_whose_layers_follow_already():
    model = toy(num_hidden_layers=4, kv_owner=(0, 1, 0, 1))
    for options in ({}, {"owners": (0, 0, 0, 0)}, {"every": 4}):
        cache = make_cache("shared", model, 1, 12, **options)
        assert_equals_oracle(model, cache, ids_for(3, [11]), [[5], [1], [5]], rule_of("shared", options))
        assert set(cache.k) == {0}
    cache = make_cache("shared", model, 1, 12, owners=(0, 1, 2, 3))
    assert_equals_oracle(model, cache, ids_for(3, [11]), [[11]], Rule())


def test_bytes_of_owners_and_reads_of_all():
    one = 2 * 2 * 8 * 8  # K and V, heads, head_dim, bytes
    for owners in MAPS:
        cache = make_cache("shared", MODEL, 2, 16, owners=owners)
        feed(MODEL, cache, ids_for(4, [10, 10]), [[9, 9], [1, 1]])
        stored = len(set(owners))
        assert cache.nbytes == stored * 2 * 16 * one and cache.nbytes_in_use == stored * 2 * 10 * one
        assert cache.bytes_read == 5 * 2 * (9 + 10) * one and cache.bytes_copied == 0
        assert sum(x.untyped_storage().nbytes() for x in stored_tensors(cache) if x.is_floating_point()) == cache.nbytes


def test_a_fork_has_the_same_map_and_bytes_of_its_own():
    text = ids_for(5, [7])[0]
    cache = make_cache("shared", MODEL, 1, 20, owners=MAPS[0])
    feed(MODEL, cache, [text], [[7]])
    before = [x.clone() for x in cache.k.values()]
    twin = cache.fork()
    got = call(MODEL, twin, [[1, 2]], [7])[0]
    assert_logits(got, dense_logits(MODEL, text + [1, 2], Rule(owners=MAPS[0]))[7:])
    assert all(torch.equal(a, b) for a, b in zip(before, cache.k.values(), strict=True))
    assert twin.owners == cache.owners and twin.nbytes == cache.nbytes
    check_fork(lambda: make_cache("shared", MODEL, 1, 20, every=1), MODEL)


def test_a_fork_in_the_middle_of_a_step_forgets_it():
    cache = make_cache("shared", MODEL, 1, 20)
    feed(MODEL, cache, [[1, 2, 3]], [[3]])
    k = torch.ones(1, 2, 1, 8, dtype=torch.float64)
    cache.append(0, k, k, torch.tensor([[3]]))
    twin = cache.fork()
    assert twin.lengths == [3] and not twin._views
    assert_logits(call(MODEL, twin, [[4]], [3])[0], dense_logits(MODEL, [1, 2, 3, 4], rule_of("shared", {}))[3:])


# ---- refusals


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"owners": (0, 0, 2)}, ValueError, "owners names 3 layers, the model has 5"),
        ({"owners": (0, 2, 2, 2, 2)}, ValueError, "layer 1 cannot use the keys of layer 2, which comes after it"),
        ({"owners": (0, 0, 1, 3, 4)}, ValueError, "layer 2 follows layer 1, which follows 0: name that one"),
        ({"owners": (0, 1, 2, 3, -4)}, ValueError, "owners of layer 4=-4 must be at least 0"),
        ({"owners": (0, 1, 2, 3, 0.0)}, TypeError, "owners of layer 4=0.0 must be an int"),
        ({"owners": 2}, TypeError, "owners=2 must name a layer for each layer"),
        ({"every": 0}, ValueError, "every=0 must be at least 1"),
        ({"every": 2.0}, TypeError, "every=2.0 must be an int"),
        ({"every": 2, "owners": (0, 0, 2, 2, 4)}, ValueError, "say the same thing twice: give one of them"),
        ({"owner": 3}, ValueError, "a shared cache has no option 'owner'; it has owners, every"),
    ],
    ids=str,
)
def test_maps_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        make_cache("shared", MODEL, 1, 8, **options)


def test_a_map_for_another_model_changes_nothing():
    """Made without a model, the map meets one of five layers."""
    cache, text = SharedLayersCache(1, 20, owners=(0, 0, 2)), ids_for(6, [6])[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layer 3 is not in owners=\(0, 0, 2\): name an owner for every layer"):
            call(MODEL, cache, [text], [0])
        assert cache.lengths == [0] and cache.nbytes_in_use == 0
    three = toy(num_hidden_layers=3)
    assert_equals_oracle(three, cache, [text], [[4], [2]], Rule(owners=(0, 0, 2)))


def test_a_follower_before_its_owner():
    cache = make_cache("shared", MODEL, 1, 20)
    k = torch.ones(1, 2, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="layer 1 follows layer 0, which has stored nothing in this step"):
        cache.append(1, k, k, torch.tensor([[0]]))
    cache.append(0, k, k, torch.tensor([[0]]))
    narrow = torch.ones(1, 1, 1, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"layer 1 has .* = \(1, 8, 8\) and follows layer 0, which has \(2, 8, 8\)"):
        cache.append(1, narrow, narrow, torch.tensor([[0]]))
    assert cache.lengths == [0]
    assert_equals_oracle(MODEL, cache, [[1, 2, 3]], [[3]], rule_of("shared", {}))


# ---- planted bugs


def keeps_its_own(self, layer, k, v, step):
    return FullCache._write(self, layer, k, v, step)


def previous_layer(self, layer, write=SharedLayersCache.owner):
    owner = write(self, layer)
    return owner if owner == layer else max(o for o in (write(self, i) for i in range(layer)) if o < layer)


def own_values(self, layer, k, v, step, write=SharedLayersCache._write):
    view = write(self, layer, k, v, step)
    if self.owner(layer) != layer and view.v.shape == v.shape:
        view.v = v
    return view


def no_clearing(self, step):
    """Views outlive their step, and are not replaced."""
    self._views = Kept(self._views)


class Kept(dict):
    def __setitem__(self, layer, view):
        self.setdefault(layer, view)


BUGS = {
    "a follower sees its own": ("_write", keeps_its_own),
    "a follower sees another owner": ("owner", previous_layer),
    "a follower has its own values": ("_write", own_values),
    "views of an earlier step": ("_finish", no_clearing),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_fails_the_check(bug, monkeypatch):
    monkeypatch.setattr(SharedLayersCache, *BUGS[bug])
    with pytest.raises((AssertionError, RuntimeError)):
        hold({"owners": (0, 1, 2, 1, 0)})
