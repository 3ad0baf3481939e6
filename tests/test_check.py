"""check_cache passes what is right, and says in words what is wrong with each planted mistake."""

import pytest
import torch
from planted import PLANTED, Plain, Preallocated, Reader, Window

import kvlab
from kvlab.attention import View
from kvlab.check import check_cache
from kvlab.check.evidence import at, spans

LIBRARY = [
    ("growing", {}, "exact"),
    ("full", {}, "exact"),
    ("paged", {"block_size": 16}, "exact"),
    ("paged", {"block_size": 3}, "exact"),
    ("offloaded", {}, "exact"),
    ("quantized", {"k_bits": 16, "v_bits": 16}, "exact"),
    ("quantized", {"k_bits": 8, "v_bits": 8, "group_size": 8, "residual_length": 8}, 0.2),
    ("quantized", {"k_bits": 2, "v_bits": 2, "group_size": 8, "residual_length": 0}, 10.0),
    ("sliding", {"window": 1}, "window"),
    ("sliding", {"window": 5}, "window"),
    ("sliding", {"window": 4, "sinks": 2}, "window"),
    ("sliding", {"window": 4, "sinks": 2, "sinks_at": "cache"}, "window"),
    ("sliding", {"window": 40, "sinks": 4}, "window"),
    ("heavy_hitter", {"budget": 400}, "exact"),
    ("heavy_hitter", {"budget": [[9, 12], [7, 5]]}, 10.0),
    ("random", {"budget": 12}, 10.0),
    ("first_last", {"budget": 9, "first": 2}, 10.0),
]


def factory_of(cls):
    if issubclass(cls, kvlab.KVCache):
        return lambda model, batch_size, max_length: cls(batch_size, max_length)
    return lambda model, batch_size, max_length: cls()


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(name):
    cls, expect, words = PLANTED[name]
    report = check_cache(factory_of(cls), expect=expect)
    assert not report.ok
    said = report.messages[0]
    assert all(w in said for w in words), said
    assert "not yet right" in str(report) and said in str(report)


def test_many_mistakes_are_planted():
    assert len(PLANTED) >= 65


@pytest.mark.parametrize(
    "expect, cls", [("exact", Reader), ("exact", Plain), ("exact", Preallocated), ("window", Window)]
)
def test_a_right_cache_gives_no_message(cls, expect):
    report = check_cache(factory_of(cls), expect=expect)
    assert report.ok and report.messages == [], report
    assert len(report.passed) >= 5 and f"{cls.__name__}: correct" in str(report)


@pytest.mark.parametrize("kind, options, expect", LIBRARY)
def test_every_cache_of_the_library_passes(kind, options, expect):
    report = check_cache(lambda model, B, L: kvlab.make_cache(kind, model, B, L, **options), expect=expect)
    assert report.ok, report
    for operation in ("fork", "rewind", "reorder", "memory"):
        assert any(operation in line for line in report.passed + report.notes), report


def test_a_model_that_is_none_is_refused():
    with pytest.raises(TypeError, match="model is an int; it must be a kvlab.GPT"):
        check_cache(lambda model, batch_size, max_length: Plain(), model=3)


def test_what_a_cache_lacks_is_not_offered_and_no_failure():
    report = check_cache(lambda model, batch_size, max_length: Plain())
    assert report.ok
    assert report.notes == [f"{name}: not offered" for name in ("nbytes", "fork", "rewind", "reorder")]


def test_a_plain_object_that_offers_operations_is_graded_on_them():
    class Wrong(Plain):
        def reorder(self, rows):
            self.held = {layer: tuple(x.flip(0) for x in kv) for layer, kv in self.held.items()}

    report = check_cache(lambda model, batch_size, max_length: Wrong())
    assert "reorder([2, 0, 0])" in report.messages[0]

    class Right(Plain):
        def reorder(self, rows):
            self.held = {layer: tuple(x[list(rows)] for x in kv) for layer, kv in self.held.items()}

        def rewind(self, n):
            self.held = {i: (k[:, :, :-n], v[:, :, :-n], pos[:, :-n]) for i, (k, v, pos) in self.held.items()}

        def fork(self):
            twin = Right()
            twin.held = dict(self.held)
            return twin

        @property
        def nbytes(self):
            return sum(k.nbytes + v.nbytes for k, v, _ in self.held.values())

    report = check_cache(lambda model, batch_size, max_length: Right())
    assert report.ok and not report.notes, report


def test_a_cache_whose_heads_keep_positions_of_their_own_passes():
    class PerHead(Reader):
        def append(self, layer, k, v, pos):
            k, v, pos = self.keep(layer, k, v, pos)
            return View(k, v, pos[:, None].expand(-1, k.shape[1], -1))

    assert check_cache(factory_of(PerHead)).ok


def test_one_copy_per_query_head_is_right_but_noted():
    class Repeats(Reader):
        def append(self, layer, k, v, pos):
            return super().append(layer, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), pos)

    report = check_cache(factory_of(Repeats))
    assert report.ok and any("2.0 times what these tokens need" in note for note in report.notes), report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_with_a_model_of_ones_own(dtype):
    config = kvlab.ModelConfig(
        vocab_size=97, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
        sliding_window=5, layer_types=("full_attention", "sliding_attention", "full_attention"),
    )  # fmt: skip
    model = kvlab.GPT(config).to(dtype)
    for p in model.parameters():
        p.data.mul_(8 if p.dim() == 2 else 1)
    assert check_cache(factory_of(Reader), model).ok
    assert check_cache(lambda m, B, L: kvlab.make_cache("paged", m, B, L), model).ok
    cls, _, words = PLANTED["StaleValue"]
    assert words[0] in check_cache(factory_of(cls), model).messages[0]


def test_a_second_mistake_is_announced():
    class Two(Reader):
        def append(self, layer, k, v, pos):
            k, v, pos = self.keep(layer, k, v, pos)
            return View(torch.cat((k[:, :, :1], k[:, :, :-1]), 2), v, pos, scale=1.0)

    said = check_cache(factory_of(Two)).messages[0]
    assert "Stale keys" in said and "There is more" in said, said


def test_what_went_well_before_is_reported():
    cls, _, _ = PLANTED["RowsFlipped"]
    report = check_cache(factory_of(cls))
    assert len(report.passed) == 2 and "then one token at a time (max |diff|" in report.passed[0]
    assert report._repr_markdown_().startswith("**RowsFlipped: not yet right**") and "\\[" in report._repr_markdown_()


def test_the_check_leaves_random_numbers_alone():
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    check_cache(factory_of(Reader))
    assert torch.equal(torch.rand(4), want)


@pytest.mark.parametrize("expect", ["exactly", 0, -1, True, None, float("nan")])
def test_bad_expect(expect):
    with pytest.raises(ValueError, match="must be 'exact', 'window' or a tolerance"):
        check_cache(factory_of(Reader), expect=expect)


def test_bad_factory_and_model():
    with pytest.raises(TypeError, match="factory is a Reader"):
        check_cache(Reader())
    model = kvlab.GPT(kvlab.ModelConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="rounding hides mistakes"):
        check_cache(factory_of(Reader), model.bfloat16())
    report = check_cache(lambda m, B, L: kvlab.make_cache("sliding", m, B, L, window=4096), expect="window")
    assert "window=4096 makes a slow check" in report.messages[0]
    report = check_cache(lambda: Reader())
    assert "The factory fails" in report.messages[0] and "TypeError" in report.messages[0]
    report = check_cache(lambda m, B, L: None)
    assert "must return a cache" in report.messages[0]


def test_positions_in_words():
    assert spans([3, 0, 1, 2, 7]) == "0 to 3, 7" and at([6]) == "position 6" and at([1, 2]) == "positions 1 to 2"
