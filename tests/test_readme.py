"""What README says in Python runs, and its table of caches names those that there are."""

import re
from pathlib import Path

from kvlab.caches import KINDS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## The same in Python")[1].split("\n## ")[0]


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", SECTION, re.S)
    names = {}
    exec(code, names)
    printed = capsys.readouterr().out
    assert "A KV cache keeps" in printed and "28 + 4" in printed
    assert names["cache"].nbytes == 32 * names["model"].config.kv_bytes_per_token(4)
    assert set(names["found"]) == {"full", "28 + 4"}


def test_the_table_names_every_kind():
    rows = re.findall(r"^\| (`.*?) \|", SECTION, re.M)
    assert [kind for row in rows for kind in re.findall(r"`(\w+)`", row)] == list(KINDS)
