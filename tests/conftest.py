"""What all tests share: the demo model, and the same numbers on every run and machine."""

import os
import random
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Two threads that wait for each other stand still whenever another process has one of the cores, and tests start many of those.
# Workers that tests start inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that reached for a model hub would pass on one machine and fail on the next.
os.environ["HF_HUB_OFFLINE"] = "1"
# One folder for all workers that tests start: what one compiles, the others find.
os.environ["MODELWORKER_CACHE_DIR"] = str(ROOT / "build")

hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None, print_blob=True)
hypothesis.settings.register_profile("explore", database=None, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Seeds every generator that is already loaded; a test that never imports torch does not pay for it."""
    random.seed(0)
    np.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The directory of SmolLM2-135M-Instruct, a real Llama checkpoint with its tokenizer."""
    directory = ROOT / "models" / "smollm2-135m-instruct"
    if not (directory / "model.safetensors").is_file():
        pytest.fail(f"{directory} is missing; `make model` fetches it", pytrace=False)
    return directory
