"""All 300 random workloads, each request held against itself alone step by step. (test-fast runs 50, in one pass.)"""

import pytest
from random_workloads import run_ten


@pytest.mark.parametrize("first", range(0, 300, 10))
def test_every_request_gets_what_it_gets_alone(first):
    run_ten(first, step_by_step=True)
