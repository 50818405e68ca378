"""Test modules of this folder import each other by plain name (model_zoo, op_cases, ...)."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
