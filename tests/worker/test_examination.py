"""Checks in a row: one that breaks never hides the others."""

import logging

import pytest

from modelworker.worker.errors import SettingsError
from modelworker.worker.examination import Check, Examination, Found, Status


def found(text: str = "fine") -> Found[int]:
    return Found(value=7, text=text)


def broken(error: Exception) -> Found[int]:
    raise error


def test_a_check_that_breaks_is_a_finding_and_the_next_one_runs() -> None:
    examination = Examination()
    examination.check("settings", lambda: broken(SettingsError("--x is wrong")), advice="change it")
    examination.check("code", lambda: broken(KeyError("a\nb")))
    examination.check("last", found)
    assert examination.checks == [
        Check(name="settings", status=Status.FAILED, finding="--x is wrong", advice="change it"),
        Check(name="code", status=Status.FAILED, finding="KeyError: 'a\\nb'"),
        Check(name="last", status=Status.OK, finding="fine"),
    ]
    assert not examination.passed


def test_a_check_that_needs_what_another_did_not_find_is_skipped_and_names_it() -> None:
    examination = Examination()
    first = examination.check("first", lambda: broken(ValueError("no")))
    second = examination.check("second", lambda: Found(value=first.value + 1, text="counted"))
    examination.check("third", lambda: Found(value=second.value + 1, text="counted"))
    assert [(check.status, check.finding) for check in examination.checks[1:]] == [
        (Status.SKIPPED, "not known without first"),
        (Status.SKIPPED, "not known without second"),
    ]


def test_a_later_check_uses_what_an_earlier_one_found() -> None:
    examination = Examination()
    first = examination.check("first", found)
    assert examination.check("second", lambda: Found(value=first.value + 1, text="counted")).value == 8
    assert examination.passed


def test_a_warning_is_no_failure() -> None:
    examination = Examination()
    examination.check("slow", lambda: Found(value=None, text="slow", status=Status.WARNING, advice="take a faster one"))
    assert examination.checks == [Check(name="slow", status=Status.WARNING, finding="slow", advice="take a faster one")]
    assert examination.passed


def test_what_the_examined_code_logs_as_a_warning_is_part_of_the_finding(caplog: pytest.LogCaptureFixture) -> None:
    def warns() -> Found[int]:
        logging.getLogger("modelworker.worker.models.config").info("not worth a word")
        logging.getLogger("modelworker.worker.models.config").warning("id %d is left out", 9)
        return found()

    examination = Examination()
    examination.check("config", warns)
    examination.check("next", found)
    assert examination.checks == [
        Check(name="config", status=Status.WARNING, finding="fine; id 9 is left out"),
        Check(name="next", status=Status.OK, finding="fine"),
    ]
    logging.getLogger("modelworker").warning("after it")
    assert caplog.messages == ["after it"]
