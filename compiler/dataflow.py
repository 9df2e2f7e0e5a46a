"""What parts of a model read, write to and make, and what that demands of memory that tensors share."""

from dataclasses import dataclass

import sympy  # type: ignore[import-untyped]
from torch import Tensor, fx

from modelworker.compiler.errors import CompileError
from modelworker.compiler.split import Geometry, Part, geometry_of, storage_of
from modelworker.compiler.trace import Sizes, Trace, place_of


@dataclass(frozen=True, slots=True)
class PartAccess:
    """A part with the nodes of the tensors that it handles.

    Attributes:
        part: a run or a splitting op.
        reads: its inputs.
        mutates: those of them that it writes to.
        makes: its results, in order.
        piece: of a run, the index of the unique piece; else -1.
    """

    part: Part
    reads: tuple[fx.Node, ...]
    mutates: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]
    piece: int = -1


def check_shared_memory(accesses: list[PartAccess], trace: Trace, external: set[fx.Node]) -> None:
    """Refuses models that read through one tensor what another part wrote through another tensor.

    Within a piece that is fine. Across pieces it is not: what a piece returns need not share memory as the model's tensors do.

    Args:
        accesses: in order.
        trace: of the model.
        external: the nodes of the step's inputs and of bound tensors.

    Raises:
        CompileError: the model does so.
    """
    last_read = {node: index for index, access in enumerate(accesses) for node in access.reads}
    last_read |= dict.fromkeys(trace.outputs, len(accesses))
    made = dict.fromkeys(external)
    for index, access in enumerate(accesses):
        for written in access.mutates:
            for other in made:
                is_read = last_read.get(other, -1) > index or other in access.reads
                if other is not written and is_read and _may_overlap(other, written, trace.sizes):
                    place = place_of(written)
                    raise CompileError(f"{written.name} is written to while {other.name}, in the same memory, is still read{place}")
        made |= dict.fromkeys(node for node in access.makes if isinstance(node.meta["example_value"], Tensor))


def _may_overlap(one: fx.Node, other: fx.Node, sizes: Sizes) -> bool:
    if storage_of(one) != storage_of(other):
        return False
    first, second = _columns(geometry_of(one, sizes)), _columns(geometry_of(other, sizes))
    if first is None or second is None or first[0] != second[0]:
        return True
    return first[1] < second[2] and second[1] < first[2]


def _columns(geometry: Geometry) -> tuple[int, int, int] | None:
    """Returns the length of the rows in which a tensor lies, and from where to where in each row; None where that is not known.

    A row is what the largest stride steps over.
    """
    if not geometry.strides or not all(isinstance(number, sympy.Integer) for number in (*geometry.strides, geometry.offset)):
        return None
    row = max(geometry.strides)
    dim = geometry.strides.index(row)
    inner = [(size, stride) for at, (size, stride) in enumerate(zip(geometry.shape, geometry.strides, strict=True)) if at != dim]
    if row == 0 or not all(isinstance(size, sympy.Integer) for size, _ in inner):
        return None
    start = int(geometry.offset) % int(row)
    end = start + sum(max(int(size) - 1, 0) * int(stride) for size, stride in inner) + 1
    return (int(row), start, end) if end <= row else None
