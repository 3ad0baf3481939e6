"""What every test run needs, wherever its files lie: one torch thread per worker."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--expect", metavar="SUITE", help="fail if fewer tests ran than tests/expected.toml asks of SUITE")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread_per_worker():
    """Two workers of two threads each on two cores are slower than two of one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)
