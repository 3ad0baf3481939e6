"""The command line: it dispatches, and bad input is one sentence and exit code 2."""

import subprocess
import sys

import pytest

from kvlab import __version__
from kvlab.cli import COMMANDS, main

GOOD = """
import torch
from kvlab import View
class Mine:
    def __init__(self, model, batch_size, max_length):
        self.kept = {}
    def append(self, layer, k, v, pos):
        if layer in self.kept:
            old = self.kept[layer]
            k, v, pos = (torch.cat(both, dim) for both, dim in zip(zip(old, (k, v, pos)), (2, 2, 1)))
        self.kept[layer] = k, v, pos
        return View(k, v, pos)
"""


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"kvlab {name} " in out for name in COMMANDS)
    assert main([]) == 2
    assert main(["--version"]) == 0 and capsys.readouterr().out.endswith(f"kvlab {__version__}\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_own_help(command, capsys):
    try:
        assert main([command, "--help"]) == 0
    except SystemExit as done:
        assert done.code == 0
    assert f"kvlab {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, says",
    [
        (["benhc"], "'benhc' is no command; the commands are fit, bench, check, serve-sim"),
        (["bench", "--new", "many"], "invalid int value: 'many'"),
        (["bench", "--variants", "ful"], "'ful' is unknown"),
        (["bench", "--model", "toy", "--device", "gpu"], "gpu"),
        (["check", "nothing"], "FILE.py:NAME"),
        (["check", "missing.py:Mine"], "no file missing.py"),
        (["check", "no_such_module:Mine"], "no_such_module"),
        (["check", "math:Mine"], "no function or class 'Mine'"),
        (["check", "math:sin", "--expect", "about"], "'about' must be exact, window or a number"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(argv, says, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.startswith("kvlab") and err.count("\n") == 1


def test_check_grades_a_cache_in_a_file(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    assert main(["check", f"{file}:Mine"]) == 0
    file.write_text(GOOD.replace("return View(k, v, pos)", "return View(k, v, pos + 1)"))
    assert main(["check", f"{file}:Mine"]) == 1
    assert "position" in capsys.readouterr().out


def test_python_m_kvlab_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "kvlab", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvlab {__version__}\n")


def test_dispatch_loads_no_torch():
    code = "import sys, kvlab.cli; kvlab.cli.main(['fit', '--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_who_has_had_enough_gets_no_error():
    """`kvlab bench | head`: a BrokenPipeError is an OSError too, and must not be told as one."""
    code = """
import sys, types, kvlab.cli
def main(argv): raise BrokenPipeError(32, "Broken pipe")
sys.modules["closed"] = types.SimpleNamespace(main=main)
kvlab.cli.COMMANDS["closed"] = ("closed", "")
sys.exit(kvlab.cli.main(["closed"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
