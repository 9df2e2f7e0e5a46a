"""Commands that run in the test's own process."""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator

import torch

from modelworker.ops.cpu.threads import torch_threads
from modelworker.worker.cli import main


@contextlib.contextmanager
def command_in_process(*words: object) -> Iterator[Callable[..., int]]:
    """Makes a function that runs a command with more words; afterwards torch, logging and the garbage collector are as before."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with torch_threads(torch.get_num_threads()):
        yield lambda *more: main([str(word) for word in (*words, *more)])
    gc.unfreeze()
    root.handlers[:] = handlers
    root.setLevel(level)
