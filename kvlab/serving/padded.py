"""A padded static batch: what model.generate() does with a list of prompts. Its own loop, for no scheduler is needed.

Rows are padded at the left to the longest prompt, then grow by one column a step, finished or not, until the last row
has ended; only then the next batch starts. Nobody knows how long the rows will run, so a batch has as many rows as fit
at max_model_len.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from kvlab.workloads import Arrival


@dataclass(frozen=True)
class PaddedStep:
    """One model step of a padded batch, in tokens (= slots)."""

    step: int  # the clock: model steps, and steps that waited for an arrival
    rows: int  # of the batch, ended or not
    live: int  # requests that have not ended
    slots: int  # rows times columns so far: all of them hold keys
    tokens: int  # of those slots, the ones with a token of a request that has not ended
    computed: int  # rows times new columns, padding included
    emitted: int  # new tokens of requests that had not ended
    ended: int  # requests for which this token was the last
    waited: int  # steps from arrival to here, summed over the requests whose first new token this is


def padded_batches(
    arrivals: Sequence[Arrival], num_slots: int, max_model_len: int = 1024, token_budget: int = 256
) -> Iterator[PaddedStep]:
    """The steps of serving `arrivals` in padded batches. None at all if not even one row of max_model_len fits.

    token_budget: prompts are fed in chunks of at most so many tokens, padding included, and at least one column.
    """
    rows, step = num_slots // max_model_len, 0
    waiting = deque(sorted(arrivals, key=lambda a: a.arrival))
    while waiting and rows:
        step = max(step, ceil(waiting[0].arrival))
        batch = []
        while waiting and len(batch) < rows and waiting[0].arrival <= step:
            batch.append(waiting.popleft())
        first = True
        for live, slots, tokens, computed, emitted, ended in _one_batch(batch, token_budget):
            waited = sum(step - ceil(a.arrival) for a in batch) if first and emitted else 0
            first = first and not emitted
            yield PaddedStep(step, len(batch), live, slots, tokens, computed, emitted, ended, waited)
            step += 1


def _one_batch(batch: list[Arrival], token_budget: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(live, slots, tokens, computed, emitted, ended) of each step. The last chunk of the prompts gives every row its
    first new token, and a row's last one is never fed: with n of them a row ends after n - 1 further steps."""
    B, longest = len(batch), max(a.prompt_tokens for a in batch)
    chunk, columns = max(1, token_budget // B), 0
    while columns < longest:
        new = min(chunk, longest - columns)
        columns += new
        tokens = sum(max(0, columns - (longest - a.prompt_tokens)) for a in batch)
        last = columns == longest
        yield B, B * columns, tokens, B * new, B * last, last * sum(a.output_tokens == 1 for a in batch)
    for i in range(2, max(a.output_tokens for a in batch) + 1):  # new token i of every row that has so many
        live = [a for a in batch if a.output_tokens >= i]
        tokens = sum(a.prompt_tokens + i - 1 for a in live)
        yield len(live), B * (longest + i - 1), tokens, B, len(live), sum(a.output_tokens == i for a in live)
