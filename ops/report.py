"""Says which ops a model runs, in which implementation, and why."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from modelworker.ops.custom_op import CustomOp, OpChoice
from modelworker.ops.registry import OPS, full_name
from modelworker.ops.replaceable import PluggableLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class OpReport:
    """One op in one implementation.

    Attributes:
        name: the registered name, or the class's where there is none.
        implementation: in use; "" where the model doesn't use the op.
        reason: why this one.
        alternatives: the other implementations that there are.
    """

    name: str
    implementation: str
    reason: str
    alternatives: tuple[str, ...] = ()


def report_ops(model: nn.Module) -> tuple[OpReport, ...]:
    """Reports every op and layer of a model, then those that are registered and not used, each by name.

    An op that runs one implementation in compiled pieces and another in recorded steps has an entry for each.
    """
    found: dict[OpReport, None] = {}
    for module in _used_modules(model):
        if isinstance(module, CustomOp):
            found[_entry(module.op_name, module.choice)] = None
            if module.recorded_choice is not None:
                found[_entry(f"{module.op_name} (recorded)", module.recorded_choice)] = None
        elif isinstance(module, PluggableLayer):
            found[_layer_entry(module)] = None
    used = {report.name for report in found}
    unused = (OpReport(name=name, implementation="", reason="not used by this model") for name in OPS.entries if name not in used)
    return (*sorted(found, key=lambda report: report.name), *sorted(unused, key=lambda report: report.name))


def _used_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of a model, without those that only the native form of an op would use where another one runs."""
    yield module
    if isinstance(module, CustomOp) and not module.uses_native:
        return
    for child in module.children():
        yield from _used_modules(child)


def _entry(name: str, choice: OpChoice) -> OpReport:
    return OpReport(name=name, implementation=choice.implementation, reason=choice.reason, alternatives=choice.alternatives)


def _layer_entry(layer: PluggableLayer) -> OpReport:
    if layer.replaced is None:
        return OpReport(name=layer.op_name, implementation="built in", reason="no plug-in replaces it")
    return OpReport(
        name=layer.op_name,
        implementation=f"out of tree ({full_name(type(layer))})",
        reason=f"replaces {full_name(layer.replaced)}",
        alternatives=("built in",),
    )


def switchable_ops() -> tuple[str, ...]:
    """Returns the names that `custom_ops` may hold: of ops, which have implementations to choose from, not of layers."""
    return tuple(name for name, entry in OPS.entries.items() if issubclass(entry, CustomOp))
