"""`custom_ops`: what may be asked for, what is refused, and the defaults."""

from typing import Any

import pytest

from modelworker.ops.op_settings import OpSettings, OpSettingsError, choose_custom_ops

KNOWN = ("rms_norm", "silu_and_mul", "rotary_embedding")


def choose(*wanted: str, **where: Any) -> tuple[str, ...]:
    return choose_custom_ops(
        wanted, **{"known": KNOWN, "opaque": (), "platform": "cpu", "compiles": False, "backend": "inductor", **where}
    )


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"platform": "cpu", "compiles": False}, "all"),
        ({"platform": "cpu", "compiles": True}, "all"),
        ({"platform": "cuda", "compiles": False}, "all"),
        ({"platform": "cuda", "compiles": True, "backend": "eager"}, "all"),
        ({"platform": "cuda", "compiles": True, "backend": "inductor"}, "none"),
    ],
)
def test_none_is_the_default_under_inductor_on_cuda_and_all_elsewhere(where: dict[str, Any], expected: str) -> None:
    assert choose(**where) == (expected,)
    assert choose("+rms_norm", "-silu_and_mul", **where) == (expected, "+rms_norm", "-silu_and_mul")


def test_ops_that_inductor_does_not_look_into_are_enabled_on_cuda_unless_they_or_all_are_named() -> None:
    where = {"platform": "cuda", "compiles": True, "opaque": ("silu_and_mul", "rms_norm")}
    assert choose(**where) == ("none", "+rms_norm", "+silu_and_mul")
    assert choose("-rms_norm", **where) == ("none", "+silu_and_mul", "-rms_norm")
    assert choose("none", **where) == ("none",)
    assert choose("all", **where) == ("all",)


def test_all_or_none_that_is_asked_for_wins_over_the_default() -> None:
    assert choose("none", "+rms_norm") == ("none", "+rms_norm")
    assert choose("-rms_norm", "all", platform="cuda", compiles=True) == ("-rms_norm", "all")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (("all", "none"), "expected one of all and none, found all,none"),
        (("+rms_norm", "-rms_norm"), r"\+rms_norm and -rms_norm contradict each other"),
        (("all", "-rms_norm", "+rms_norm"), r"\+rms_norm and -rms_norm contradict each other"),
        (("rms_norm",), "expected all, none, .name or -name, found 'rms_norm'"),
        (("+",), "found '\\+'"),
        (("",), "found ''"),
        (("-rmsnorm",), "-rmsnorm: no op has the name 'rmsnorm'; did you mean rms_norm"),
        (("+silu",), r"\+silu: no op has the name 'silu'; did you mean silu_and_mul"),
        (("+xyz",), "there are rms_norm, rotary_embedding, silu_and_mul"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_name(wanted: tuple[str, ...], message: str) -> None:
    with pytest.raises(OpSettingsError, match=message):
        choose(*wanted)


@pytest.mark.parametrize("custom_ops", [(), ("+rms_norm",), ("all", "none"), ("all", "+a", "-a"), ("everything",)])
def test_settings_hold_exactly_one_of_all_and_none_and_no_contradiction(custom_ops: tuple[str, ...]) -> None:
    with pytest.raises(OpSettingsError):
        OpSettings(custom_ops=custom_ops)
