"""A model that Inductor divided at the splitting ops, after its own passes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from modelworker.compiler.model import CompiledModel, Piece, RunPiece
from modelworker.compiler.program import Program


class PartitionedModel(CompiledModel):
    """A compiled model of one stage, whose code calls functions between the splitting ops: those are its pieces.

    Inductor decides what they read and write, so their slots are not known. Equal ones are separate code.
    """

    def __init__(
        self,
        program: Program,
        codes: Sequence[RunPiece],
        bound: Mapping[str, Tensor],
        *,
        plain_codes: Sequence[RunPiece] | None = None,
    ) -> None:
        """Binds a program to its code and tensors, see `CompiledModel`."""
        super().__init__(program, codes, bound, plain_codes=plain_codes)
        # The object of the generated module that calls its `partitions`.
        self._runner: Any = codes[0].__self__  # type: ignore[attr-defined]
        self._named = bound

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The functions, in order."""
        return tuple(Piece(index, index, (), (), (), run) for index, run in enumerate(self._runner.partitions))

    def with_pieces(self, wrap: Callable[[Piece], RunPiece]) -> CompiledModel:
        """Returns the model with other code in place of each function, see `CompiledModel.with_pieces`."""
        runner = type(self._runner)(partitions=[wrap(piece) for piece in self.pieces])
        return PartitionedModel(self.program, [runner.call], self._named, plain_codes=self._plain_codes)

    def plain(self) -> CompiledModel:
        """Returns the model as one piece that calls its ops one by one, over the same tensors."""
        return self if self._plain_codes is None else CompiledModel(self.program, self._plain_codes, self._named)
