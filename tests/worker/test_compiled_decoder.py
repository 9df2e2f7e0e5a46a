"""What the decoder's compiled code is known to be made of."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.trace import trace_model
from modelworker.worker import decoder_setup
from modelworker.worker.models.causal_lm import AttentionMetadata
from modelworker.worker.settings import ExecutionSettings
from modelworker.worker.step_buffers import StepInputs
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings_with

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def test_every_file_whose_code_is_traced_is_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[ModelSource] = []
    decoder_source = decoder_setup.decoder_source

    def remember(*args: Any, **options: Any) -> ModelSource:
        sources.append(decoder_source(*args, **options))
        return sources[-1]

    monkeypatch.setattr(decoder_setup, "decoder_source", remember)
    settings = tiny_settings_with(execution=ExecutionSettings(optimization_level=1, compiler="eager"))
    with engine_of(save_tiny(tmp_path), settings):
        (source,) = sources
        with torch.inference_mode():
            nodes = list(trace_model(source).graph.nodes)
    named = {name for node in nodes for name in re.findall(r'File "([^"]+)"', node.meta.get("stack_trace") or "")}
    # No op of the graph stands in these.
    named |= {inspect.getfile(kind) for kind in (StepInputs, AttentionMetadata)}
    root = Path(decoder_setup.__file__).resolve().parents[1]
    traced = {path for path in (Path(name).resolve() for name in named) if path.is_relative_to(root)}
    own = {path.relative_to(root).as_posix() for path in traced if path != Path(__file__).resolve()}
    assert {"worker/compiled_decoder.py", "worker/step_buffers.py", "worker/models/llama.py"} <= own
    assert traced <= {path.resolve() for path in source.sources} | {root / "compiler" / "trace.py"}
