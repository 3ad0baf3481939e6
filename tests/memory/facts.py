"""Facts from public sources, one a line: engines' logs, models' configurations. Predictions never see the answers."""

import json
from pathlib import Path

HERE = Path(__file__).parent


def lines(name: str) -> list[dict]:
    """All entries of engine_logs.jsonl or model_configs.jsonl."""
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


def question(entry: dict) -> dict:
    """The entry without its answers."""
    return {k: v for k, v in entry.items() if not k.startswith("expected_")}
