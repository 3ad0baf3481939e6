"""50 random workloads, ten in a test; the other 250 are in tests/serving_full."""

from collections import Counter

import pytest
from random_workloads import run_workload


def run_ten(first: int, step_by_step: bool = False) -> None:
    """Ten workloads, in which what they are there for did happen."""
    happened = sum((run_workload(seed, step_by_step) for seed in range(first, first + 10)), Counter())
    least = {"preempted": 10, "forked": 10, "copied": 2, "hits": 10, "resumed_hits": 3, "chunks": 10, "tokens": 250}
    for what, n in {**least, "stopped": 2, "length": 20}.items():
        assert happened[what] >= n, f"{what} happened {happened[what]} times: {happened}"


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_every_request_gets_what_it_gets_alone(first):
    run_ten(first)
