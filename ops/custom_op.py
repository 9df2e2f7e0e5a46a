"""One op with several implementations, of which each instance uses one, chosen when it is made."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar, TypeVar

from torch import nn

from modelworker.ops.native_compile import DynamicDims, maybe_compile
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.registry import REPLACEMENTS, full_name
from modelworker.ops.replaceable import Replaceable

_logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)
Forward = Callable[..., Any]

NATIVE = "native"
CPP = "c++"
TRITON = "triton"
_PLATFORM_FORWARDS = {"cpu": "forward_cpu", "cuda": "forward_cuda"}
_IMPLEMENTATIONS = {"forward_native": NATIVE, "forward_cpu": CPP, "forward_cuda": TRITON, "forward_oot": "out of tree"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpChoice:
    """What an op runs, and why.

    Attributes:
        implementation: e.g. "native", "c++", "out of tree (package.Class)".
        reason: why this one.
        alternatives: the other implementations that the class has.
    """

    implementation: str
    reason: str
    alternatives: tuple[str, ...]


class CustomOp(Replaceable):
    """An op as a layer: `forward_native` in plain PyTorch, and whichever of `forward_cuda`, `forward_cpu` and `forward_oot` it has.

    Args:
        ops: the settings of the model's ops.
        enforce_enable: whether the op is enabled whatever the settings say.
        compile_native: whether the native form is compiled by itself where the op is disabled. For ops inside of an opaque op only.
        cpu_obstacle: why this instance can't run its class's `forward_cpu`; "" where it can.
        cuda_obstacle: the same of `forward_cuda`.
        replacement_obstacle: why this instance can't run what a replacement brings; "" where it can. Otherwise the kernel of the
            class that is replaced runs, and a warning says so.

    Attributes:
        choice: what is run.
        recorded_choice: what is run instead while a step is recorded; None: the same.
    """

    __call__: Forward
    dynamic_arg_dims: ClassVar[DynamicDims | None] = None
    has_one_form: ClassVar[bool] = False
    """Whether what is chosen holds for recorded steps, too."""

    def __init__(
        self,
        *,
        ops: OpSettings,
        enforce_enable: bool = False,
        compile_native: bool = False,
        cpu_obstacle: str = "",
        cuda_obstacle: str = "",
        replacement_obstacle: str = "",
    ) -> None:
        super().__init__()
        self._obstacles = {"forward_cpu": cpu_obstacle, "forward_cuda": cuda_obstacle}
        if self.replaced is not None and replacement_obstacle:
            self.choice, self._chosen = self._leave_replacement_out(ops, replacement_obstacle)
        else:
            self.choice, self._chosen = self._choose(ops, enforce_enable, compile_native)
        self.recorded_choice, self._recorded = self._choose_recorded(ops)
        self._forward = self._chosen

    @classmethod
    def register(cls, name: str, dynamic_arg_dims: DynamicDims | None = None) -> Callable[[Class], Class]:
        """Gives the decorated class its name.

        Args:
            name: for settings and reports.
            dynamic_arg_dims: see `maybe_compile`.

        Raises:
            ValueError: the name is taken.
            TypeError: what is decorated is no CustomOp.
        """
        named = super().register(name)

        def decorate(op: Class) -> Class:
            named(op).dynamic_arg_dims = dynamic_arg_dims  # type: ignore[attr-defined]
            return op

        return decorate

    @property
    def uses_native(self) -> bool:
        """Whether `forward_native` is what runs, or what runs while no step is recorded."""
        choices = (self.choice, self.recorded_choice)
        return any(choice is not None and choice.implementation.startswith(NATIVE) for choice in choices)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hot path: runs the chosen implementation."""
        return self._forward(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """The op in plain PyTorch, which a compiler can fuse with its neighbours."""
        raise NotImplementedError(f"{full_name(type(self))} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """The op as a Triton kernel; without one, native."""
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """The op as a C++ kernel; without one, native."""
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """The op as an out-of-tree class computes it, on every platform; without one, native."""
        return self.forward_native(*args, **kwargs)

    def _choose(self, ops: OpSettings, enforce_enable: bool, compile_native: bool) -> tuple[OpChoice, Forward]:
        enabled, reason = self._is_enabled(ops, enforce_enable)
        if enabled:
            method = self._enabled_forward(ops)
            if method == "forward_native":
                reason = f"{reason}, but {self._why_native(ops)}"
            return self._explain(method, reason), getattr(self, method)
        native = self.forward_native
        forward = maybe_compile(native, ops, self.dynamic_arg_dims) if compile_native else native
        return self._explain("forward_native", reason, suffix="" if forward == native else ", compiled by itself"), forward

    def _leave_replacement_out(self, ops: OpSettings, obstacle: str) -> tuple[OpChoice, Forward]:
        method = _PLATFORM_FORWARDS[ops.platform]
        reason = f"{full_name(type(self))} is left out: {obstacle}"
        if REPLACEMENTS.warns_first(f"{self.op_name}: {reason}"):
            _logger.warning("%s: %s", self.op_name, reason)
        others = (_IMPLEMENTATIONS["forward_native"],)
        choice = OpChoice(implementation=_IMPLEMENTATIONS[method], reason=reason, alternatives=others)
        return choice, MethodType(getattr(self.replaced, method), self)

    def _choose_recorded(self, ops: OpSettings) -> tuple[OpChoice | None, Forward]:
        """A recorded list has no use for native code: it holds the platform's kernel unless the op was switched off by name."""
        method = _PLATFORM_FORWARDS[ops.platform]
        # What a replacement computes is what it was made for: never the kernel of what it replaces.
        is_bypassed = self.replaced is not None and not self._is_own(method)
        if self.has_one_form or is_bypassed or not ops.records or not self._can_run(method) or f"-{self.op_name}" in ops.custom_ops:
            return None, self._chosen
        choice = self._explain(method, "a recorded step runs the platform's kernels")
        if choice.implementation == self.choice.implementation:
            return None, self._chosen
        return choice, getattr(self, method)

    def _is_enabled(self, ops: OpSettings, enforce_enable: bool) -> tuple[bool, str]:
        if enforce_enable:
            return True, "enforced where the layer is made"
        if "op_name" in (self.replaced or type(self)).__dict__:
            for item, enabled in ((f"+{self.op_name}", True), (f"-{self.op_name}", False)):
                if item in ops.custom_ops:
                    return enabled, f"custom_ops has {item}"
            return ops.enables_all, f"custom_ops is {ops.global_setting}"
        return ops.enables_all, f"not registered, and custom_ops is {ops.global_setting}"

    def _enabled_forward(self, ops: OpSettings) -> str:
        """Returns the method of an enabled op. A replacement that brings none runs native, not the kernel of what it replaces."""
        for method in ("forward_oot", _PLATFORM_FORWARDS[ops.platform]):
            if self._is_own(method) if self.replaced else self._can_run(method):
                return method
        return "forward_native"

    def _why_native(self, ops: OpSettings) -> str:
        method = _PLATFORM_FORWARDS[ops.platform]
        if self.replaced is None and self._has(method):
            return self._obstacles[method]
        return f"there is no {_IMPLEMENTATIONS[method]} implementation"

    def _can_run(self, method: str) -> bool:
        return self._has(method) and (not self._obstacles[method] or self._is_own(method))

    def _has(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(CustomOp, method)

    def _is_own(self, method: str) -> bool:
        """Whether a replacement brings this method itself."""
        return self.replaced is not None and getattr(type(self), method) is not getattr(self.replaced, method)

    def _explain(self, method: str, reason: str, suffix: str = "") -> OpChoice:
        def label(name: str) -> str:
            return _IMPLEMENTATIONS[name] + (f" ({full_name(type(self))})" if self._is_own(name) else "")

        if self.replaced is not None and not any(self._is_own(name) for name in _IMPLEMENTATIONS):
            reason = f"{full_name(type(self))} overrides nothing; {reason}"
        others = tuple(label(name) for name in _IMPLEMENTATIONS if name != method and self._has(name))
        return OpChoice(implementation=label(method) + suffix, reason=reason, alternatives=others)


@contextlib.contextmanager
def recorded_forms(model: nn.Module) -> Iterator[None]:
    """Lets the ops of a model run what a recorded step runs, as long as it is being recorded."""
    ops = [module for module in model.modules() if isinstance(module, CustomOp)]
    for op in ops:
        op._forward = op._recorded
    try:
        yield
    finally:
        for op in ops:
            op._forward = op._chosen
