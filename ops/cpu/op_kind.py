"""What a recorder has to know of an op, found out once."""

from typing import Any, Final, NamedTuple

import torch
from torch._ops import OpOverload

DEPENDS_ON_VALUES: Final = "depends on a tensor's values"

_aten: Final = torch.ops.aten
_ALLOCATIONS: Final = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted, _aten.new_empty, _aten.new_empty_strided}
)
_VALUE_TAGS: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_TENSOR_TYPES: Final = frozenset({"Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"})


class OpKind(NamedTuple):
    """What is the same in every call of an op.

    Attributes:
        is_kernel: whether it is one of the library's.
        is_made_of_others: in inference mode torch dispatches such an op as a whole, although some of the others may be views.
        obstacle: why it can't be recorded whatever its arguments are, "" where it can.
        runs_nothing: whether it only returns its arguments' memory, or memory that nothing was written to.
        only_changes_view: whether it changes an argument's shape and nothing else.
        is_allocation: whether what it returns holds nothing yet.
    """

    is_kernel: bool
    is_made_of_others: bool
    obstacle: str
    runs_nothing: bool
    only_changes_view: bool
    is_allocation: bool

    @classmethod
    def of(cls, op: OpOverload, kernels: str) -> "OpKind":
        """Finds out about an op.

        Args:
            op: the op.
            kernels: namespace of the library's ops.
        """
        is_kernel = op.namespace == kernels
        is_allocation = op.overloadpacket in _ALLOCATIONS
        return cls(
            is_kernel=is_kernel,
            is_made_of_others=not is_kernel and op._can_decompose(),
            obstacle=_obstacle(op),
            runs_nothing=is_allocation or (op.is_view and not op._schema.is_mutable),
            only_changes_view=torch.Tag.inplace_view in op.tags,
            is_allocation=is_allocation,
        )


def reads_a_mask(op: OpOverload, args: tuple[Any, ...]) -> bool:
    """Returns whether a call is one of indexing by a mask, whose result has as many elements as the mask's values say."""
    return op is _aten.index.Tensor and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _obstacle(op: OpOverload) -> str:
    """Returns why an op can't be recorded whatever its arguments are, "" where it can."""
    overloads = (getattr(op.overloadpacket, name) for name in op.overloadpacket.overloads())
    # An index may be a mask.
    if op is not _aten.index.Tensor and any(tag in overload.tags for overload in overloads for tag in _VALUE_TAGS):
        return DEPENDS_ON_VALUES
    if any(str(value.type) not in _TENSOR_TYPES for value in op._schema.returns):
        return "returns something else than tensors"
    return ""
