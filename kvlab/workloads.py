"""Workloads: which requests arrive when, and how long they are. Pure Python, seeded, no torch and no text.

A request is known by its lengths, so that ten thousand of them can be simulated without a model; prompt_ids() makes
token ids for it when a model is to run. Time is counted in model steps, which no machine's speed changes.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from kvlab.config import check_int


@dataclass(frozen=True)
class Arrival:
    """One request as the outside world sees it. The server does not know output_tokens beforehand.

    id:            a name, different for each request: printable characters, no space before or behind them.
    prompt_tokens, output_tokens: how many it brings and how many it will generate, both at least 1.
    arrival:       the model step at which it arrives, at least 0; between two steps it waits for the next.
    prefix_tokens: how many of the prompt's first tokens are the shared text `prefix_id` (a system prompt), 0 for none.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    arrival: float = 0.0
    prefix_tokens: int = 0
    prefix_id: str = ""

    def __post_init__(self):
        if self.id == "":
            raise ValueError("id='' must be a name of at least one character")
        for name in ("id", "prefix_id"):
            text = getattr(self, name)  # a line break or a space at its end would not survive a CSV file
            if not isinstance(text, str) or not text.isprintable() or text != text.strip():
                raise ValueError(
                    f"{name}={text!r} must be a text of printable characters, no space before or behind it"
                )
        check_int("prompt_tokens", self.prompt_tokens)
        check_int("output_tokens", self.output_tokens)
        _check_number("arrival", self.arrival)
        if self.arrival < 0:
            raise ValueError(f"arrival={self.arrival} must be at least 0")
        check_int("prefix_tokens", self.prefix_tokens, 0)
        if self.prefix_tokens > self.prompt_tokens:
            raise ValueError(
                f"prefix_tokens={self.prefix_tokens} must be at most the prompt's {self.prompt_tokens} tokens"
            )

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def workload(
    n: int,
    *,
    rate: float | None = None,
    burst: int = 1,
    shared_prefix: int = 0,
    prompt_median: float = 128,
    output_median: float = 128,
    sigma: float = 0.8,
    max_model_len: int = 1024,
    seed: int = 0,
) -> list[Arrival]:
    """n requests in the order of their arrival; the same seed gives the same ones, and fewer of them a beginning.

    Lengths are lognormal: half of the prompts are shorter than prompt_median, and the natural logarithm spreads by
    sigma. They are clipped, not drawn again: a prompt to max_model_len - 1, then the output to what max_model_len
    leaves beside its prompt.
    rate:  None: all arrive at step 0. Else Poisson arrivals, `rate` requests a model step on average.
    burst: so many arrive together; the gaps between bursts grow with it, so that the rate stays.
    shared_prefix: tokens of one system prompt that stands in front of every prompt (and is clipped with it).
    Lengths and arrivals have random streams of their own: another rate does not change the lengths.
    """
    check_int("n", n)
    check_int("burst", burst)
    check_int("shared_prefix", shared_prefix, 0)
    check_int("max_model_len", max_model_len, 2)
    check_int("seed", seed, 0)
    for name, value in (("prompt_median", prompt_median), ("output_median", output_median), ("sigma", sigma)):
        _check_number(name, value)
    if not 1 <= min(prompt_median, output_median) <= max(prompt_median, output_median) <= 10**9:
        raise ValueError(f"medians must be between 1 and 10^9 tokens, not {prompt_median} and {output_median}")
    if not 0 <= sigma <= 10:
        raise ValueError(f"sigma={sigma} must be between 0 (all alike) and 10")
    if rate is not None:
        _check_number("rate", rate)
        if not rate >= 1e-9:
            raise ValueError(f"rate={rate} must be at least 1e-9 requests a model step, or None: all at once")
        burst = min(burst, n)  # a larger one is no other: all of them come at step 0
    lengths, gaps = random.Random(seed), random.Random(f"arrivals {seed}")
    made, now = [], 0.0
    for i in range(n):
        if rate is not None and i and i % burst == 0:
            now += gaps.expovariate(rate / burst)
        prompt = shared_prefix + max(1, round(lengths.lognormvariate(math.log(prompt_median), sigma)))
        output = max(1, round(lengths.lognormvariate(math.log(output_median), sigma)))
        prompt = min(prompt, max_model_len - 1)
        output = min(output, max_model_len - prompt)
        shared = min(shared_prefix, prompt)
        made.append(Arrival(f"r{i}", prompt, output, now, shared, "system" if shared else ""))
    return made


def prompt_ids(request: Arrival, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids for a request's prompt, alike for every request with the same prefix_id up to prefix_tokens."""
    check_int("vocab_size", vocab_size)
    common = random.Random(f"prefix {seed} {request.prefix_id}")
    own = random.Random(f"prompt {seed} {request.id}")
    shared = request.prefix_tokens
    return common.choices(range(vocab_size), k=shared) + own.choices(
        range(vocab_size), k=request.prompt_tokens - shared
    )


# ---- traces

COLUMNS = tuple(f.name for f in fields(Arrival))
REQUIRED = ("prompt_tokens", "output_tokens")


def read_trace(
    path: str | Path, *, max_model_len: int | None = None, on_bad: Callable[[str], None] | None = None
) -> list[Arrival]:
    """The requests of a CSV file with a header, or a JSONL file with one object a line, in the order of arrival.

    Columns (JSONL: keys), in any order:
        prompt_tokens, output_tokens   whole numbers of at least 1: required
        arrival         model steps, a number of at least 0; default 0
        id              a name that no other row has; default "row1", "row2", ... by the row's place
        prefix_tokens   whole number: how many of the prompt's tokens are shared text; default 0
        prefix_id       which shared text; default ""
    max_model_len: rows with more tokens than this, prompt and output together, are bad rows.
    on_bad: called with one sentence for each bad row, which is left out. Without it, a bad row raises ValueError with
    the file, the line and what is wrong, and nothing is read. An unreadable file or header always raises.
    """
    path = Path(path)
    rows = {".csv": _csv_rows, ".jsonl": _jsonl_rows}.get(path.suffix.lower())
    if rows is None:
        raise ValueError(f"{path}: a trace is a .csv or a .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    found, lines, problems = [], {}, []
    for place, (line, row) in enumerate(rows(path, text), 1):
        try:
            if isinstance(row, str):  # what is wrong with the whole line
                raise ValueError(row)
            request = _request(row, f"row{place}")
            if request.id in lines:
                raise ValueError(f"id {request.id!r} stands in line {lines[request.id]} already")
            if max_model_len is not None and request.total_tokens > max_model_len:
                both = f"{request.prompt_tokens} + {request.output_tokens}"
                raise ValueError(f"{both} tokens are more than max_model_len={max_model_len}")
        except (ValueError, TypeError) as error:
            problems.append(f"{path}, line {line}: {error}")
        else:
            lines[request.id] = line
            found.append(request)
    if problems and on_bad is None:
        more = f" (and {len(problems) - 1} more bad rows)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)
    for problem in problems:
        on_bad(problem)
    if not found:
        raise ValueError(f"{path} has no {'good ' if problems else ''}rows")
    return sorted(found, key=lambda request: request.arrival)


def write_trace(path: str | Path, requests: Sequence[Arrival]) -> None:
    """Write requests with all columns, as CSV or JSONL by the file's ending; read_trace() gives them back."""
    path, rows = Path(path), [asdict(request) for request in requests]
    if path.suffix.lower() == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif path.suffix.lower() == ".csv":
        out = io.StringIO()
        table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        text = out.getvalue()
    else:
        raise ValueError(f"{path}: a trace is a .csv or a .jsonl file")
    path.write_text(text, encoding="utf-8")


def _csv_rows(path, text):
    """(line, row as a dict of texts, or a sentence) of each row. ValueError for a header that will not do."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield line, str(error)
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            _check_header(path, header)
        elif len(cells) != len(header):
            yield line, f"{len(cells)} fields under a header of {len(header)}"
        else:
            yield line, {name: cell.strip() for name, cell in zip(header, cells) if cell.strip()}


def _check_header(path, header: list[str]) -> None:
    if unknown := [name for name in header if name not in COLUMNS]:
        raise ValueError(f"{path}: column {unknown[0]!r} is not known; columns are {', '.join(COLUMNS)}")
    if twice := [name for name in header if header.count(name) > 1]:
        raise ValueError(f"{path}: column {twice[0]!r} stands there twice")
    if missing := [name for name in REQUIRED if name not in header]:
        raise ValueError(f"{path}: column {missing[0]!r} is missing; there are {', '.join(header)}")


def _jsonl_rows(path, text):
    for line, written in enumerate(text.split("\n"), 1):
        if not written.strip():
            continue
        try:
            row = json.loads(written)
        except (ValueError, RecursionError):  # a ValueError also for a number of thousands of digits
            yield line, "this is not JSON that can be read"
            continue
        if not isinstance(row, dict):
            yield line, f"a JSON {type(row).__name__} stands where an object should"
        elif unknown := [name for name in row if name not in COLUMNS]:
            yield line, f"key {unknown[0]!r} is not known; keys are {', '.join(COLUMNS)}"
        else:
            yield line, {name: value for name, value in row.items() if value is not None}


def _request(row: dict, default_id: str) -> Arrival:
    """A row's request. CSV has texts where JSONL has numbers."""
    if missing := [name for name in REQUIRED if name not in row]:
        raise ValueError(f"{missing[0]} is missing")
    numbers = {
        name: _number(name, value, float if name == "arrival" else int)
        for name, value in row.items()
        if name not in ("id", "prefix_id")
    }
    texts = {name: _text(name, row[name]) for name in ("id", "prefix_id") if name in row}
    return Arrival(**{"id": default_id, **texts, **numbers})


def _number(name: str, value, kind: type):
    if isinstance(value, str):
        try:
            return kind(value)
        except ValueError:
            raise ValueError(f"{name}={value!r} must be a {'whole ' if kind is int else ''}number") from None
    return value


def _text(name: str, value) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{name}={value!r} must be a text")
    return str(value)


def _check_number(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number")
    if not abs(value) <= sys.float_info.max:  # an int may be larger than any float
        raise ValueError(f"{name}={value} must be finite")
