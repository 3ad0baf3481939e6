"""50 random workloads, ten in a test; tests/serving_full runs all 300."""

import pytest
from random_workloads import run_ten


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_every_request_gets_what_it_gets_alone(first):
    run_ten(first)
