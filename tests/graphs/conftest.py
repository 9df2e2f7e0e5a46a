from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """As in the engine."""
    with torch.inference_mode():
        yield
