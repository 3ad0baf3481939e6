"""SmolLM2, loaded once for all of this folder."""

import pytest
import torch

from kvlab import load_smollm2
from kvlab.checkpoint import CheckpointError


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) in float32."""
    try:
        return load_smollm2(torch.float32)
    except CheckpointError as error:
        pytest.skip(f"SmolLM2's file cannot be had: {error}")
