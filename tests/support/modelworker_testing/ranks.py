"""Runs a function on several tensor-parallel ranks, each a process, over gloo."""

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models import TensorParallel
from modelworker.worker.models.embedding import ParallelLMHead, VocabParallelEmbedding
from modelworker.worker.models.linear import MergedColumnParallelLinear, OutputPart, RowParallelLinear
from modelworker_testing.paged_runs import load_ours, our_logits, random_prompt

TIMEOUT = datetime.timedelta(seconds=60)


def run_on_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Calls `function(TensorParallel, *args)` on each rank and returns what each returned.

    The function must be importable by name from a module of this package.
    """
    context = multiprocessing.get_context("forkserver")
    # The server imports torch once for all the ranks of all the tests. It doesn't find this module, whose folder pytest adds.
    context.set_forkserver_preload(["torch.distributed", "modelworker.worker.models"])
    with tempfile.TemporaryDirectory() as directory:
        processes = [context.Process(target=_run, args=(function, rank, size, directory, args)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(2 * TIMEOUT.total_seconds())
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * size
        return [torch.load(Path(directory) / f"result-{rank}", weights_only=True) for rank in range(size)]


def _run(function: Callable[..., Any], rank: int, size: int, directory: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=size, timeout=TIMEOUT)
    result = function(TensorParallel(rank=rank, size=size), *args)
    torch.save(result, Path(directory) / f"result-{rank}")
    dist.destroy_process_group()


def model_logits(parallel: TensorParallel, directory: Path, num_kv_heads: int) -> list[torch.Tensor]:
    """Logits of two prompts, with this rank's share of the model."""
    model = load_ours(directory, parallel=parallel)
    return our_logits(model, [random_prompt(20), random_prompt(9)], chunk=6, num_kv_heads=num_kv_heads)


def layer_outputs(parallel: TensorParallel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of each kind of layer, with this rank's share of `weights`."""
    options = {"dtype": torch.float32, "ops": OpSettings(), "tp_rank": parallel.rank, "tp_size": parallel.size}
    hidden, inner, vocab = 16, 24, 7
    column = MergedColumnParallelLinear(hidden, [OutputPart("column", inner)], bias=True, prefix="column", **options)
    row = RowParallelLinear(inner, hidden, bias=True, prefix="row", **options)
    unreduced = RowParallelLinear(inner, hidden, bias=True, reduce_results=False, prefix="row", **options)
    alone = RowParallelLinear(inner, hidden, bias=True, disable_tp=True, prefix="row", **options)
    embedding = VocabParallelEmbedding(vocab, hidden, prefix="embedding", **options)
    head = ParallelLMHead(vocab, hidden, prefix="head", **options)
    tied = ParallelLMHead(vocab, hidden, prefix="head", tied_to=embedding, **options)
    for layer in (column, row, unreduced, alone, embedding, head):
        for slot in layer.checkpoint_slots():
            if slot.parameter is not None:
                target = layer.get_parameter(slot.parameter.rpartition(".")[2])
                source = weights[slot.name].narrow(slot.dim, slot.source_start, slot.length)
                target.narrow(slot.dim, slot.target_start, slot.length).copy_(source)
    with torch.inference_mode():
        share = column(weights["x"])
        return {
            "column": share,
            "row": row(share),
            "unreduced": unreduced(share),
            "alone": alone(weights["y"]),
            "embedding": embedding(torch.arange(vocab, dtype=torch.int32)),
            "head": head(weights["x"]),
            "tied": tied(weights["x"]),
        }
