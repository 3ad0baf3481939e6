"""The calculator against real caches where layers share: the model's own map (kv_owner), or the cache's."""

import random

import pytest

from kvlab.config import ModelConfig
from kvlab.memory import ConfigError, estimate

from .test_held import DTYPES, draw, filled, one_thread  # noqa: F401  (a fixture)


def some_map(r, layers):
    owners = []
    for layer in range(layers):
        owners.append(r.choice([layer, *{o for o in owners if owners[o] == o}]))
    return tuple(owners)


@pytest.mark.parametrize("kind", draw(0)[4])
def test_layers_that_follow_hold_nothing(kind):
    for seed in range(40):
        config, lengths, max_length, dtype, options = draw(seed)
        config = config.with_(kv_owner=some_map(random.Random(seed), config.num_hidden_layers))
        cache = filled(kind, config, lengths, max_length, dtype, options[kind])
        found = estimate(
            config, seq_len=lengths, kv_dtype=DTYPES[dtype], cache=kind, max_length=max_length, **options[kind]
        )
        assert found.held_bytes == cache.nbytes, (seed, config.kv_owner)


@pytest.mark.parametrize("follows", [False, True], ids=["plain model", "model whose layers follow"])
def test_a_cache_that_shares_holds_its_owners(follows):
    for seed in range(60):
        config, lengths, max_length, dtype, _ = draw(seed)
        r, n = random.Random(seed), 6
        own = some_map(r, n)
        config = config.with_(num_hidden_layers=n, layer_types=None, kv_owner=own if follows else None)
        # owners must be layers that store something
        owners = r.choice([own, (0,) * n]) if follows else some_map(r, n)
        options = r.choice([{"owners": owners}, {} if not follows else {"every": n}, {"every": r.choice([1, n, 9])}])
        cache = filled("shared", config, lengths, max_length, dtype, options)
        found = estimate(
            config, seq_len=lengths, kv_dtype=DTYPES[dtype], cache="shared", max_length=max_length, **options
        )
        assert found.held_bytes == cache.nbytes, (seed, options)


def test_offloaded_holds_what_a_full_cache_holds():
    for seed in range(20):
        config, lengths, max_length, dtype, _ = draw(seed)
        cache = filled("offloaded", config, lengths, max_length, dtype, {})
        found = estimate(config, seq_len=lengths, kv_dtype=DTYPES[dtype], cache="offloaded", max_length=max_length)
        assert found.held_bytes == cache.nbytes == sum(cache.nbytes_on().values())


@pytest.mark.parametrize(
    "options,message",
    [
        ({"owners": (0, 0)}, "owners names 2 layers, the model has 4"),
        ({"owners": (0, 0, 1, 3)}, "layer 2 follows layer 1, which follows 0"),
        ({"every": 0}, "every=0 must be at least 1"),
        ({"every": 2, "owners": (0, 0, 2, 2)}, "say the same thing twice"),
        ({"owner": 1}, "a shared cache has no option 'owner'; it has owners, every"),
    ],
    ids=str,
)
def test_refusals(options, message):
    with pytest.raises(ConfigError, match=message):
        estimate(ModelConfig(), 1, 8, cache="shared", **options)


def test_half_the_layers_half_the_bytes():
    full, half = (estimate(ModelConfig(), 2, 64, cache=kind).held_bytes for kind in ("full", "shared"))
    assert full == 2 * half
