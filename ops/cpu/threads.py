"""The number of threads that torch and the kernels use."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Uses another number for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
