"""The same model in transformers, compiled by torch: what a user would have without a worker."""

import importlib
import inspect
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpu_check.plan import Plan
from gpu_check.row import Row

_WARM_UP_STEPS = 5
_STEPS = 20


def compiled_decode(plan: Plan, name: str) -> Iterator[Row]:
    """Measures decodes of one sequence over a static cache, the forward compiled as a whole, on CUDA as graphs."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        yield Row(part="transformers", what=name, status="skipped", note=f"transformers can't be imported: {error}")
        return
    with torch.inference_mode():
        decode = _Decode(transformers, plan, name)
        for _ in range(_WARM_UP_STEPS):
            decode()
        times = [_milliseconds(decode) for _ in range(_STEPS)]
    yield Row(
        part="transformers",
        what=f"decode 1 x 1, context {plan.contexts[0]}",
        way="torch.compile" if plan.device.type == "cuda" else "torch.compile, eager backend",
        value=statistics.median(times),
        unit="ms",
        note=f"{min(times):.3g} .. {max(times):.3g} ms, {name}, transformers {transformers.__version__}",
    )


class _Decode:
    """A model with random weights, a prompt in its cache, and one compiled step after the other."""

    def __init__(self, transformers: types.ModuleType, plan: Plan, name: str) -> None:
        self._device = plan.device
        self._length = plan.contexts[0]
        model = _make_model(transformers, plan, name)
        sizes = {"max_cache_len": self._length + _WARM_UP_STEPS + _STEPS, "max_batch_size": 1}
        places = {"device": plan.device, "dtype": torch.bfloat16}
        cache_class = transformers.StaticCache
        cache = cache_class(config=model.config, **_accepted(cache_class.__init__, {**sizes, **places}))
        # Arguments have changed their names from version to version.
        self._parameters = inspect.signature(model.forward).parameters
        self._cache = {"cache" if "cache" in self._parameters else "past_key_values": cache}
        # Elsewhere than on the device that is measured, it is enough to see that this works.
        options: dict[str, Any] = {"mode": "reduce-overhead"} if plan.device.type == "cuda" else {"backend": "eager"}
        self._compiled = torch.compile(model, dynamic=False, **options)
        prompt = torch.ones(1, self._length, dtype=torch.int64, device=plan.device)
        self._token = self._next(model, prompt, torch.arange(self._length, device=plan.device))

    def __call__(self) -> None:
        """Decodes a token and waits for it."""
        position = torch.tensor([self._length], device=self._device)
        self._token = self._next(self._compiled, self._token, position)
        self._token.tolist()
        self._length += 1

    def _next(self, run: Callable[..., Any], token_ids: Tensor, positions: Tensor) -> Tensor:
        named = {"position_ids": positions[None], "cache_position": positions}
        places = {name: value for name, value in named.items() if name in self._parameters}
        output = run(token_ids, use_cache=True, **self._cache, **places)
        token: Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return token


def _make_model(transformers: types.ModuleType, plan: Plan, name: str) -> Any:
    fields = {key: value for key, value in plan.model(name).items() if key not in ("architectures", "model_type", "torch_dtype")}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(plan.device):
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    finally:
        torch.set_default_dtype(default)


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def _milliseconds(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begun)
