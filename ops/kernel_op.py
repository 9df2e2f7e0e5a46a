"""The simplest op: a function, and kernels that take the same arguments."""

from typing import Any, ClassVar

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.op_settings import OpSettings


class KernelOp(CustomOp):
    """An op whose `forward_cpu` and `forward_cuda` hand their arguments to kernels. A derived class brings `forward_native`.

    Args:
        ops: the settings of the model's ops.

    Attributes:
        kernel: the kernels' name, which a class sets.
    """

    kernel: ClassVar[str]

    def __init__(self, *, ops: OpSettings) -> None:
        super().__init__(ops=ops, cpu_obstacle=ops.kernels_obstacle, cuda_obstacle=ops.triton_obstacle)
        if ops.kernels is not None:
            self._kernel = getattr(ops.kernels.ops, self.kernel).default
        if ops.triton is not None:
            self._triton = getattr(ops.triton.ops, self.kernel).default

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward_native`, by the C++ kernel."""
        return self._kernel(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward_native`, by the Triton kernel."""
        return self._triton(*args, **kwargs)
