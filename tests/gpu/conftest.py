"""The device of the tests that need one: the GPU, or what MODELWORKER_TEST_DEVICE names, to see that the tests themselves work."""

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def device() -> torch.device:
    kind = os.environ.get("MODELWORKER_TEST_DEVICE", "cuda")
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """For compiled code."""
    return Path(os.environ.get("MODELWORKER_TEST_CACHE", ROOT / "build"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
