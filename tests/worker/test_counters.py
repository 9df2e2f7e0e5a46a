import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworker.worker.counters import Counters


def test_counters_start_at_zero_and_add_up():
    counters = Counters()
    counters.increment("steps_total")
    counters.increment("steps_total", 4)
    counters.increment("zero_total", 0)
    assert counters.snapshot() == {"steps_total": 5, "zero_total": 0}


def test_labels_are_spelled_as_prometheus_does_in_the_order_of_their_names():
    counters = Counters()
    counters.increment("rpcs_total", method="ExecuteStep", code="OK")
    counters.increment("rpcs_total", code="OK", method="ExecuteStep")
    counters.increment("steps_total", mode="FULL")
    assert counters.snapshot() == {'rpcs_total{code="OK",method="ExecuteStep"}': 2, 'steps_total{mode="FULL"}': 1}


def test_special_characters_in_label_values_are_escaped():
    counters = Counters()
    counters.increment("x", label='a"b\\c\nd')
    assert list(counters.snapshot()) == [r'x{label="a\"b\\c\nd"}']


@given(st.lists(st.text(), unique=True, max_size=10))
def test_different_label_values_never_share_a_counter(values: list[str]):
    counters = Counters()
    for value in values:
        counters.increment("x", label=value)
    assert list(counters.snapshot().values()) == [1] * len(values)


def test_the_snapshot_is_sorted_and_a_copy():
    counters = Counters()
    for name in ("b", "a", "c"):
        counters.increment(name)
    snapshot = counters.snapshot()
    snapshot["a"] = 100
    assert list(snapshot) == ["a", "b", "c"]
    assert counters.snapshot()["a"] == 1


def test_a_negative_amount_is_refused():
    with pytest.raises(ValueError, match="never fall"):
        Counters().increment("x", -1)


def test_no_increment_of_many_threads_is_lost():
    counters = Counters()

    def count() -> None:
        for _ in range(2000):
            counters.increment("x", mode="NONE")

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {'x{mode="NONE"}': 16000}
