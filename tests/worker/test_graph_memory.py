"""A start for which the memory is too small stops, and says what to lower."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.graphs.full import FullGraphs
from modelworker.worker import capture
from modelworker.worker.errors import SettingsError
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of


@pytest.mark.parametrize(
    ("run_number", "graph"), [(0, "FULL 8 tokens 8 sequences of 1"), (1, "FULL 4 tokens 4 sequences of 1")], ids=["first", "second"]
)
def test_where_a_graph_does_not_fit_the_start_stops_and_names_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_number: int, graph: str
) -> None:
    runs: list[int] = []

    def large(decode: Any) -> FullGraphs:
        def run(*inputs: Tensor) -> Sequence[Tensor]:
            runs.append(len(runs))
            if runs[-1] == run_number:
                # More than any machine has addresses for.
                torch.empty(2**58, dtype=torch.uint8)
            return decode(*inputs)  # type: ignore[no-any-return]

        return FullGraphs(run)

    monkeypatch.setattr(capture, "FullGraphs", large)
    with pytest.raises(SettingsError) as caught, engine_of(save_tiny(tmp_path)):
        pass
    for part in (
        f"there is no memory for the graph of {graph}: lower --kv-cache-memory",
        "--kv-cache-fraction",
        "--max-sequences",
        "--decode-graph-sizes",
        "--mixed-graph-sizes",
    ):
        assert part in str(caught.value)
