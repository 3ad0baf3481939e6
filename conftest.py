"""What every test run needs wherever its files lie: counted tests, red hidden errors, one torch thread per worker."""

import os
import re
import tomllib
from pathlib import Path

import pytest


def pytest_addoption(parser):
    parser.addoption("--expect", metavar="SUITE", help="fail if fewer tests ran than tests/expected.toml asks of SUITE")


def pytest_configure(config):
    see_hidden_notebook_errors()


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread_per_worker():
    """Two workers of two threads each on two cores are slower than two of one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def see_hidden_notebook_errors():
    """nbmake looks at cell outputs only; an error caught by a widget stays green. Make it red (see hidden_errors)."""
    try:
        from nbmake.nb_result import NotebookError, NotebookResult
        from nbmake.nb_run import NotebookRun
    except ImportError:  # then no notebook is run either
        return
    from kvlab.nbclean import hidden_errors

    if getattr(NotebookRun.execute, "sees_hidden_errors", False):
        return
    execute = NotebookRun.execute

    def execute_and_look(self):
        result = execute(self)
        if result.error is None and (found := hidden_errors(result.nb)):
            cell, text = found[0]
            error = NotebookError(summary=text.split("\n")[-1], trace=text, failing_cell_index=cell)
            result = NotebookResult(nb=result.nb, error=error)
        return result

    execute_and_look.sees_hidden_errors = True
    NotebookRun.execute = execute_and_look


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session, exitstatus):
    """With --expect SUITE: a run that lost tests, or skipped one for a reason that nobody listed, has failed."""
    config = session.config
    suite = config.getoption("--expect")
    if not suite or hasattr(config, "workerinput") or exitstatus not in (0, 5):
        return
    expected = tomllib.loads((Path(__file__).parent / "tests" / "expected.toml").read_text())[suite]
    stats = config.pluginmanager.get_plugin("terminalreporter").stats
    ran = len(stats.get("passed", ())) + len(stats.get("xfailed", ()))
    config.complaints = []
    for report in stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if any(re.search(allowed, reason) for allowed in expected["may_skip"]):
            ran += 1
        else:
            config.complaints.append(f"{report.nodeid} was skipped: {reason!r} is not listed in tests/expected.toml")
    if ran < expected["at_least"]:
        config.complaints.append(f"{ran} tests ran; tests/expected.toml asks for at least {expected['at_least']}")
    if config.complaints:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    for complaint in getattr(config, "complaints", ()):
        terminalreporter.write_line(f"NOT AS EXPECTED: {complaint}", red=True, bold=True)
