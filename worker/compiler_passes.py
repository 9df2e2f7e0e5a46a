"""Which graph passes of the compiler run, as the settings ask for it."""

from modelworker.compiler.settings import PASS_NAMES
from modelworker.worker.errors import SettingsError


def disabled_passes(switches: tuple[str, ...]) -> tuple[str, ...]:
    """Resolves --compiler-passes to the passes that do not run, in the order in which passes run.

    Raises:
        SettingsError: it names something else.
    """
    disabled = set()
    for switch in switches:
        if switch == "none":
            disabled |= set(PASS_NAMES)
        elif switch.startswith("-") and switch[1:] in PASS_NAMES:
            disabled.add(switch[1:])
        else:
            expected = ", ".join(f"-{name}" for name in PASS_NAMES)
            raise SettingsError(f"--compiler-passes: {switch!r} is no pass to switch off: expected none, or some of {expected}")
    return tuple(name for name in PASS_NAMES if name in disabled)
