"""What attention and the drawing of tokens take by themselves."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_check.plan import BLOCK_SIZE, ROUNDS, Plan
from gpu_check.row import Row
from modelworker.ops.triton_library import load_triton
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.step_bench import StepCase

# Layers, each with a cache of its own, until all of them are far larger than a GPU's caches.
_LEAST_BYTES = {"cuda": 1 << 30, "cpu": 1 << 16}
_MOST_LAYERS = 32
_VOCAB_SIZE = 128256


def attention_alone(plan: Plan, name: str) -> Iterator[Row]:
    """Measures decode attention of several layers, as a share of what reading keys and values takes at the bandwidth of copies.

    In tables as wide as the longest sequence, and with the shortest context again in ones that are far wider: what a step takes
    should depend on its contexts alone.
    """
    triton = load_triton() if plan.device.type == "cuda" else None
    probe = LimitProbe(plan.device, torch.bfloat16, None)
    attend = (torch.ops.modelworker if triton is None else triton.ops).paged_attention.default
    narrow, wide = plan.table_tokens
    cases = [(case, narrow) for case in plan.decodes]
    cases += [(case, wide) for case in plan.decodes if case.context_len == min(plan.contexts)]
    for case, table_tokens in cases:
        layers = _Layers.make(plan, name, case, table_tokens)
        timer = _Timer(plan.device, partial(layers.attend, attend))
        found = sorted((timer.milliseconds(), probe.measure().read_bytes_per_second) for _ in range(ROUNDS))
        milliseconds, bandwidth = found[len(found) // 2]
        yield Row(
            part=f"attention {name}",
            what=str(case) if table_tokens == narrow else f"{case}, tables for {table_tokens}",
            way="native" if triton is None else "triton",
            value=1000 * milliseconds / len(layers.caches),
            unit="us",
            share=layers.num_bytes / bandwidth / (milliseconds / 1000),
            note=f"a layer of {len(layers.caches)}; {found[0][0]:.3g} .. {found[-1][0]:.3g} ms for all",
        )


def drawing(plan: Plan) -> Iterator[Row]:
    """Measures the drawing of tokens from rows of logits, with and without filters."""
    if plan.device.type != "cuda":
        yield Row(part="sampling", what="drawing", status="skipped", note="is a kernel of the GPU")
        return
    triton = load_triton()
    for num_rows in plan.batches:
        logits = torch.randn(num_rows, _VOCAB_SIZE, device=plan.device)
        for way, top_k, top_p in (("unfiltered", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
            timer = _Timer(plan.device, partial(triton.ops.sample_tokens, *_drawn(logits, top_k, top_p)))
            times = sorted(timer.milliseconds() for _ in range(ROUNDS))
            yield Row(
                part="sampling", what=f"{num_rows} rows of {_VOCAB_SIZE}", way=way, value=1000 * times[len(times) // 2], unit="us"
            )


def _drawn(logits: Tensor, top_k: int, top_p: float) -> tuple[Tensor, ...]:
    ones = torch.ones(logits.shape[0], device=logits.device)
    integers = torch.arange(logits.shape[0], device=logits.device)
    return logits, ones, (0 * integers + top_k).int(), top_p * ones, 0 * ones, integers, integers


class _Layers(NamedTuple):
    """Attention of several layers over caches of their own."""

    query: Tensor
    caches: list[tuple[Tensor, Tensor]]
    starts: Tensor
    lens: Tensor
    tables: Tensor
    num_bytes: int

    @classmethod
    def make(cls, plan: Plan, name: str, case: StepCase, table_tokens: int) -> "_Layers":
        model, device = plan.model(name), plan.device
        num_heads, num_kv_heads, head_dim = (model[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        num_sequences, length = case.num_sequences, case.context_len + 1
        width = -(-length // BLOCK_SIZE)
        layer_bytes = 2 * num_sequences * length * num_kv_heads * head_dim * torch.bfloat16.itemsize
        num_layers = max(1, min(-(-_LEAST_BYTES[device.type] // layer_bytes), _MOST_LAYERS))
        sizes = (num_sequences * width + 1, num_kv_heads, BLOCK_SIZE, head_dim)
        caches = [
            (torch.randn(sizes, dtype=torch.bfloat16, device=device), torch.randn(sizes, dtype=torch.bfloat16, device=device))
            for _ in range(num_layers)
        ]
        tables = torch.zeros(num_sequences, -(-table_tokens // BLOCK_SIZE), dtype=torch.int32)
        tables[:, :width] = torch.randperm(num_sequences * width).view(num_sequences, width) + 1
        query = torch.randn(num_sequences, num_heads, head_dim, dtype=torch.bfloat16, device=device)
        starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device)
        lens = torch.full((num_sequences,), length, dtype=torch.int32, device=device)
        num_bytes = num_layers * (layer_bytes + 2 * query.numel() * query.itemsize)
        return cls(query, caches, starts, lens, tables.to(device), num_bytes)

    def attend(self, run: Callable[..., None]) -> None:
        output = torch.empty_like(self.query)
        scale = self.query.shape[-1] ** -0.5
        for key_cache, value_cache in self.caches:
            run(
                *(self.query, key_cache, value_cache, output, self.starts, self.lens, self.tables, output[:0]),
                *(scale, 0, 0.0),
            )


class _Timer:
    """Measures how long the device is busy; on a GPU replays a graph, so that launches cost nothing."""

    def __init__(self, device: torch.device, run: Callable[[], Any]) -> None:
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                run()
        self.milliseconds()

    def milliseconds(self) -> float:
        if self._graph is None:
            return _milliseconds_on_the_host(self._run)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def _milliseconds_on_the_host(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begun)
