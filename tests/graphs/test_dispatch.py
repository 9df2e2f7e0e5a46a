"""Every batch against the table that graphs.md's words make, written a second time here."""

import itertools
import logging
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworker.graphs.dispatch import Choice, Dispatcher, Reason
from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape
from modelworker_testing.graph_batches import Rows, rows_that_hit, shape_of
from modelworker_testing.graph_settings import settings_of_graphs

FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE
Expected = tuple[str, int | None, int | None, int | None, str]
"""Mode, padded tokens, padded sequences, query length of the graph, reason."""


def _ladder(end: int) -> list[int]:
    numbers = [1, 2, 4]
    while numbers[-1] < 256:
        numbers.append(numbers[-1] + 8 if numbers[-1] > 4 else 8)
    while numbers[-1] < end:
        numbers.append(numbers[-1] + 16)
    return [number for number in numbers if number < end] + [end]


def _full_tokens(settings: GraphSettings, query_len: int) -> list[int]:
    most = settings.max_sequences
    while most * query_len > settings.max_tokens_per_step:
        most -= 1
    wanted = settings.decode_sizes or _ladder(most * query_len)
    sizes = set()
    for number in wanted:
        while number % query_len:
            number += 1  # noqa: PLW2901
        sizes.add(min(number, most * query_len))
    return sorted(sizes)


def _mixed_tokens(settings: GraphSettings) -> list[int]:
    if settings.mixed_sizes:
        return sorted(settings.mixed_sizes)
    decode = settings.max_sequences * max(settings.decode_query_lens)
    return sorted({min(number, settings.max_tokens_per_step) for number in [*_ladder(min(2 * decode, 512)), decode]})


def _smallest(sizes: list[int], tokens: int) -> int | None:
    return next((size for size in sizes if size >= tokens), None)


def _expected(settings: GraphSettings, rows: Rows) -> Expected:
    tokens = sum(query_len for query_len, _ in rows)
    if tokens == 0:
        return "NONE", None, None, None, "empty"
    has_full = settings.mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    decode = all(context_len > 0 and query_len in settings.decode_query_lens for query_len, context_len in rows)
    uniform = len({query_len for query_len, _ in rows}) == 1
    if has_full and decode and uniform:
        query_len = rows[0][0]
        size = _smallest(_full_tokens(settings, query_len), tokens)
        if size is not None:
            return "FULL", size, size // query_len, query_len, ""
    why_not_full = "not_decode" if not decode else "over_max" if uniform else "not_uniform"
    if settings.mode in ("NONE", "FULL_DECODE_ONLY"):
        return "NONE", None, None, None, why_not_full if has_full else "disabled"
    size = _smallest(_mixed_tokens(settings), tokens)
    if size is None or (settings.mode == "FULL" and len(rows) > settings.max_sequences):
        return "NONE", None, None, None, "over_max"
    if settings.mode == "FULL":
        return "FULL", size, settings.max_sequences, None, ""
    return "PIECEWISE", size, None, None, why_not_full if has_full else ""


def _found(choice: Choice) -> Expected:
    key = choice.key
    if key is None:
        return "NONE", None, None, None, choice.reason.value
    return key.mode.name, key.num_tokens, key.num_sequences, key.uniform_query_len, choice.reason.value


def _batches(tokens: int) -> Iterator[Rows]:
    """Uniform batches of 1, 2, 3, 5 tokens a row, decode and prefill, and mixed ones: all with the same number of tokens."""
    for query_len in (1, 2, 3, 5):
        if tokens % query_len == 0 and tokens:
            rows = [(query_len, 11)] * (tokens // query_len)
            yield rows
            yield [*rows[:-1], (query_len, 0)]
    if tokens == 0:
        yield []
    if tokens >= 1:
        yield [(tokens, 0)]
        yield [(tokens, 64)]
    if tokens >= 3:
        yield [(1, 9)] * (tokens % 7) + [(tokens - tokens % 7, 0)] if tokens > 7 else [(1, 4), (tokens - 1, 4)]
        yield [(2, 4)] + [(1, 4)] * (tokens - 2)


SETTINGS = [
    (64, 1024, (1, 2, 3, 5)),
    (64, 1024, (1,)),
    (600, 600, (1, 3)),
    (13, 40, (2, 5)),
    (300, 300, (3,)),
]


@pytest.mark.parametrize("limits", SETTINGS, ids=str)
@pytest.mark.parametrize("mode", CaptureMode)
def test_every_batch_of_up_to_600_tokens_runs_as_the_specification_says(
    mode: CaptureMode, limits: tuple[int, int, tuple[int, ...]]
) -> None:
    max_sequences, max_tokens, query_lens = limits
    settings = GraphSettings(max_sequences=max_sequences, max_tokens_per_step=max_tokens, mode=mode, decode_query_lens=query_lens)
    dispatcher = Dispatcher(settings)
    wrong = [
        (rows, found, expected)
        for tokens in range(601)
        for rows in _batches(tokens)
        if (found := _found(dispatcher.choose(shape_of(rows, settings)))) != (expected := _expected(settings, rows))
    ]
    assert wrong[:3] == []


_RANDOM_ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=90)


@given(settings_of_graphs(), _RANDOM_ROWS)
def test_any_batch_under_any_settings_runs_as_the_specification_says(settings: GraphSettings, rows: Rows) -> None:
    assert _found(Dispatcher(settings).choose(shape_of(rows, settings))) == _expected(settings, rows)


@given(settings_of_graphs())
def test_g02_the_batch_that_a_graph_was_captured_for_runs_in_that_graph(settings: GraphSettings) -> None:
    dispatcher = Dispatcher(settings)
    for key in dispatcher.keys:
        assert dispatcher.choose(shape_of(rows_that_hit(key), settings)).key == key


def test_g02_eight_tokens_in_rows_of_two_hit_their_graph_once() -> None:
    settings = GraphSettings(max_sequences=4, max_tokens_per_step=64, decode_query_lens=(2,))
    key = Dispatcher(settings).choose(shape_of([(2, 5)] * 4, settings)).key
    assert key == GraphKey(FULL, 8, 4, 2)


def test_g03_a_decode_batch_takes_a_larger_full_graph_before_a_nearer_piecewise_one() -> None:
    settings = GraphSettings(
        max_sequences=6,
        max_tokens_per_step=64,
        decode_query_lens=(3, 5),
        decode_sizes=(3, 6, 9, 18),
        mixed_sizes=(1, 2, 4, 8, 16),
    )
    dispatcher = Dispatcher(settings)
    assert dispatcher.choose(shape_of([(3, 8)] * 4, settings)) == (GraphKey(FULL, 18, 6, 3), Reason.NONE)
    assert dispatcher.choose(shape_of([(5, 8)] * 3, settings)) == (GraphKey(FULL, 20, 4, 5), Reason.NONE)
    assert dispatcher.choose(shape_of([(3, 8)] * 3 + [(5, 8)], settings)) == (
        GraphKey(PIECEWISE, 16, None, None),
        Reason.NOT_UNIFORM,
    )


@pytest.mark.parametrize(("max_sequences", "query_len"), [(12, 1), (32, 17), (64, 1), (5, 3)])
def test_g04_a_step_at_the_maximum_hits_a_graph(max_sequences: int, query_len: int) -> None:
    settings = GraphSettings(max_sequences=max_sequences, max_tokens_per_step=1024, decode_query_lens=(query_len,))
    choice = Dispatcher(settings).choose(shape_of([(query_len, 100)] * max_sequences, settings))
    assert choice == (GraphKey(FULL, max_sequences * query_len, max_sequences, query_len), Reason.NONE)


@pytest.mark.parametrize("rows", [[(3, 0)], [(3, 0), (3, 9)], [(1, 0)], [(1, 7), (1, 0)]])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_g01_a_fresh_prompt_never_runs_in_a_decode_graph(mode: str, rows: Rows) -> None:
    settings = GraphSettings(max_sequences=8, max_tokens_per_step=64, decode_query_lens=(1, 3), mode=CaptureMode(mode))
    choice = Dispatcher(settings).choose(shape_of(rows, settings))
    assert choice.mode is not FULL
    assert choice.reason is Reason.NOT_DECODE


@given(settings_of_graphs(), st.integers(0, 2**32))
def test_a_graph_has_a_place_for_every_token_and_row_and_stays_within_the_limits(settings: GraphSettings, seed: int) -> None:
    generator = random.Random(seed)
    dispatcher = Dispatcher(settings)
    for _ in range(10):
        rows = [(generator.choice(settings.decode_query_lens), generator.randint(0, 1)) for _ in range(generator.randint(0, 90))]
        shape = shape_of(rows, settings)
        key = dispatcher.choose(shape).key
        if key is not None:
            assert key in dispatcher.keys
            assert shape.num_tokens <= key.num_tokens <= settings.max_tokens_per_step
            assert key.num_sequences is None or shape.num_sequences <= key.num_sequences <= settings.max_sequences


SMALL = GraphSettings(max_sequences=4, max_tokens_per_step=64)
DECODE, PROMPT, HUGE = [(1, 5)] * 3, [(7, 0)], [(60, 0)]


@pytest.mark.parametrize("reason", [Reason.FAILED_SELF_CHECK, Reason.NOT_CAPTURED])
def test_a_disabled_mode_is_not_chosen_and_says_why(reason: Reason) -> None:
    dispatcher = Dispatcher(SMALL)
    dispatcher.disable(FULL, reason)
    assert dispatcher.disabled == {FULL: reason}
    assert _found(dispatcher.choose(shape_of(DECODE, SMALL))) == ("PIECEWISE", 4, None, None, reason)
    assert _found(dispatcher.choose(shape_of(PROMPT, SMALL))) == ("PIECEWISE", 8, None, None, "not_decode")
    dispatcher.disable(PIECEWISE, reason)
    assert dispatcher.choose(shape_of(DECODE, SMALL)) == (None, reason)
    assert dispatcher.choose(shape_of(PROMPT, SMALL)) == (None, reason)
    assert dispatcher.choose(shape_of(HUGE, SMALL)) == (None, reason)


def test_without_piecewise_decode_still_runs_full() -> None:
    dispatcher = Dispatcher(SMALL)
    dispatcher.disable(PIECEWISE, Reason.FAILED_SELF_CHECK)
    assert _found(dispatcher.choose(shape_of(DECODE, SMALL))) == ("FULL", 4, 4, 1, "")
    assert dispatcher.choose(shape_of(PROMPT, SMALL)) == (None, Reason.FAILED_SELF_CHECK)


def test_the_first_reason_for_which_a_mode_is_disabled_stays() -> None:
    dispatcher = Dispatcher(SMALL)
    dispatcher.disable(FULL, Reason.NOT_CAPTURED)
    dispatcher.disable(FULL, Reason.FAILED_SELF_CHECK)
    assert dispatcher.disabled == {FULL: Reason.NOT_CAPTURED}


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_where_full_is_all_there_is_its_obstacle_is_the_reason(mode: str) -> None:
    settings = GraphSettings(max_sequences=4, max_tokens_per_step=64, mode=CaptureMode(mode))
    dispatcher = Dispatcher(settings)
    dispatcher.disable(FULL, Reason.FAILED_SELF_CHECK)
    assert dispatcher.choose(shape_of(DECODE, settings)) == (None, Reason.FAILED_SELF_CHECK)


@pytest.mark.parametrize(
    ("sizes", "level"),
    [({"mixed_sizes": (8,)}, "WARNING"), ({"decode_sizes": (2,)}, "INFO"), ({}, "INFO")],
    ids=["chosen sizes", "chosen sizes of other batches", "default sizes"],
)
def test_a_step_above_all_graphs_is_told_of_once_and_a_warning_only_where_sizes_were_chosen(
    caplog: pytest.LogCaptureFixture, sizes: dict[str, tuple[int, ...]], level: str
) -> None:
    settings = GraphSettings(max_sequences=4, max_tokens_per_step=64, **sizes)  # type: ignore[arg-type]
    dispatcher = Dispatcher(settings)
    with caplog.at_level(logging.INFO):
        for rows in (DECODE, PROMPT, HUGE, HUGE, [(61, 0)]):
            dispatcher.choose(shape_of(rows, settings))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (level, "a step of 60 tokens, 1 sequences is larger than the largest graph")
    ]


def test_every_reason_is_given_to_some_step() -> None:
    """A reason that no step gets is a word too many."""
    given_reasons = set()
    for mode, disabled in itertools.product(CaptureMode, [{}, {FULL: Reason.NOT_CAPTURED}, {PIECEWISE: Reason.FAILED_SELF_CHECK}]):
        settings = GraphSettings(max_sequences=4, max_tokens_per_step=64, mode=mode, decode_query_lens=(1, 3))
        dispatcher = Dispatcher(settings)
        for disabled_mode, reason in disabled.items():
            dispatcher.disable(disabled_mode, reason)
        for rows in ([], DECODE, PROMPT, HUGE, [(1, 5), (3, 5)]):
            given_reasons.add(dispatcher.choose(shape_of(rows, settings)).reason)
    for why in (Reason.NO_KERNELS, Reason.NOT_COMPILED):
        nothing = Dispatcher(GraphSettings(max_sequences=4, max_tokens_per_step=64, mode=CaptureMode.NONE), why_none=why)
        given_reasons.add(nothing.choose(shape_of(DECODE, SMALL)).reason)
    assert given_reasons == set(Reason)


@pytest.mark.parametrize(
    ("mode", "disabled", "served"),
    [
        ("FULL_AND_PIECEWISE", [], "FULL_AND_PIECEWISE"),
        ("FULL_AND_PIECEWISE", ["FULL"], "PIECEWISE"),
        ("FULL_AND_PIECEWISE", ["PIECEWISE"], "FULL_DECODE_ONLY"),
        ("FULL_AND_PIECEWISE", ["FULL", "PIECEWISE"], "NONE"),
        ("FULL_DECODE_ONLY", ["FULL"], "NONE"),
        ("FULL", ["FULL"], "NONE"),
        ("PIECEWISE", ["PIECEWISE"], "NONE"),
        ("NONE", [], "NONE"),
    ],
)
def test_what_is_served_is_the_mode_without_those_out_of_service(mode: str, disabled: list[str], served: str) -> None:
    dispatcher = Dispatcher(GraphSettings(max_sequences=4, max_tokens_per_step=16, mode=CaptureMode(mode)))
    for name in disabled:
        dispatcher.disable(RuntimeMode[name], Reason.FAILED_SELF_CHECK)
    assert dispatcher.served_mode == served


@pytest.mark.parametrize("mode", CaptureMode)
def test_where_compiled_code_is_out_of_service_every_step_without_a_graph_says_so(mode: CaptureMode) -> None:
    dispatcher = Dispatcher(GraphSettings(max_sequences=2, max_tokens_per_step=64, mode=mode))
    shapes = [StepShape(2, 2, 1, True), StepShape(2, 1, None, False), StepShape(64, 2, None, False)]
    keys = [dispatcher.choose(shape).key for shape in shapes]
    dispatcher.disable(RuntimeMode.NONE, Reason.FAILED_SELF_CHECK)
    choices = [dispatcher.choose(shape) for shape in shapes]
    assert [choice.key for choice in choices] == keys
    assert all(choice.reason is Reason.FAILED_SELF_CHECK for choice in choices if choice.key is None)
    assert dispatcher.choose(StepShape(0, 0, None, True)).reason is Reason.EMPTY
    assert dispatcher.served_mode is mode
