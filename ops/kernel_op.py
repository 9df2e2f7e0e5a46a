"""The simplest op: a function, and a C++ kernel that takes the same arguments."""

from typing import Any, ClassVar

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.op_settings import OpSettings


class KernelOp(CustomOp):
    """An op whose `forward_cpu` hands its arguments to a C++ kernel. A class that derives from it brings `forward_native`.

    Args:
        ops: the settings of the model's ops.

    Attributes:
        kernel: the kernel's name, which a class sets.
    """

    kernel: ClassVar[str]

    def __init__(self, *, ops: OpSettings) -> None:
        super().__init__(ops=ops, cpu_obstacle=ops.kernels_obstacle)
        if ops.kernels is not None:
            self._kernel = getattr(ops.kernels.ops, self.kernel).default

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward_native`, by the C++ kernel."""
        return self._kernel(*args, **kwargs)
