"""Which sizes are captured."""

import pytest
from hypothesis import given

from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, make_key
from modelworker.graphs.sizes import full_sizes, gaps, graph_keys, mixed_sizes
from modelworker_testing.graph_settings import settings_of_graphs


def _settings(max_sequences: int, max_tokens: int = 8192, *query_lens: int, **more: object) -> GraphSettings:
    return GraphSettings(
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens,
        decode_query_lens=query_lens or (1,),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("settings", "query_len", "sizes"),
    [
        (_settings(1), 1, [1]),
        (_settings(3), 1, [1, 2, 3]),
        (_settings(12), 1, [1, 2, 4, 8, 12]),
        (_settings(64), 1, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (_settings(300), 1, [1, 2, 4, *range(8, 257, 8), 272, 288, 300]),
        (_settings(6, 8192, 3), 3, [3, 6, 9, 18]),
        (_settings(6, 8192, 3, 5), 5, [5, 10, 20, 25, 30]),
        (_settings(8, 20, 3), 3, [3, 6, 9, 18]),
        (_settings(8, 8192, 3, decode_sizes=(7, 1, 2, 16)), 3, [3, 9, 18]),
        (_settings(20, exact_up_to=10), 1, [*range(1, 11), 16, 20]),
        (_settings(5, exact_up_to=64), 1, [1, 2, 3, 4, 5]),
        (_settings(9, 8192, 3, exact_up_to=4), 3, [3, 6, 9, 12, 18, 24, 27]),
        (_settings(9, 8192, 1, decode_sizes=(8,), exact_up_to=4), 1, [8]),
        (_settings(4, 8192, 1, 5, decode_sizes=(2, 20)), 1, [2, 4]),
        (_settings(4, 8192, 1, 5, decode_sizes=(2, 20)), 5, [5, 20]),
    ],
)
def test_the_ladder_of_a_query_length_has_multiples_of_it_and_ends_at_the_largest_batch(
    settings: GraphSettings, query_len: int, sizes: list[int]
) -> None:
    assert list(full_sizes(settings, query_len)) == sizes


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (_settings(1), [1, 2]),
        (_settings(4), [1, 2, 4, 8]),
        (_settings(6, 8192, 3), [1, 2, 4, 8, 16, 18, 24, 32, 36]),
        (_settings(300), [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 300]),
        (_settings(32, 8192, 17), [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 544]),
        (_settings(32, 520, 17), [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 520]),
        (_settings(12, exact_up_to=10), [*range(1, 11), 12, 16, 24]),
        (_settings(64, 100), [1, 2, 4, *range(8, 97, 8), 100]),
        (_settings(64, 100, mixed_sizes=(32, 7, 100)), [7, 32, 100]),
    ],
)
def test_mixed_sizes_end_at_twice_the_largest_decode_batch_or_512_and_hold_that_batch(
    settings: GraphSettings, sizes: list[int]
) -> None:
    assert list(mixed_sizes(settings)) == sorted(sizes)


@given(settings_of_graphs())
def test_no_size_is_above_the_limits(settings: GraphSettings) -> None:
    """G06."""
    for key in graph_keys(settings):
        assert 1 <= key.num_tokens <= settings.max_tokens_per_step
        assert key.num_sequences is None or 1 <= key.num_sequences <= settings.max_sequences
        assert key.uniform_query_len is None or key.num_tokens == key.num_sequences * key.uniform_query_len


def test_g06_default_sizes_are_clipped_to_a_limit_of_four_sequences() -> None:
    settings = _settings(4, 4)
    assert [key.num_tokens for key in graph_keys(settings)] == [4, 2, 1, 4, 2, 1]


@pytest.mark.parametrize(("max_sequences", "query_len"), [(12, 1), (32, 17), (13, 1), (7, 3), (255, 1), (257, 2), (1, 1)])
def test_g04_the_largest_decode_batch_is_captured(max_sequences: int, query_len: int) -> None:
    settings = _settings(max_sequences, 8192, query_len)
    largest = max_sequences * query_len
    assert GraphKey(RuntimeMode.FULL, largest, max_sequences, query_len) in graph_keys(settings)
    assert GraphKey(RuntimeMode.PIECEWISE, largest, None, None) in graph_keys(settings)


@given(settings_of_graphs(explicit=False))
def test_by_default_only_mixed_batches_have_a_gap(settings: GraphSettings) -> None:
    for gap in gaps(settings):
        assert gap.uniform_query_len is None
        assert not gap.is_chosen
        assert gap.largest_captured >= min(512, settings.max_tokens_per_step, 2 * settings.max_sequences)


def test_g04_a_gap_below_the_limits_is_stated() -> None:
    settings = _settings(32, 1024, 1, 17, decode_sizes=(8, 512))
    assert [(str(gap), gap.is_chosen) for gap in gaps(settings)] == [
        ("decode batches of query length 17 of 528 .. 544 tokens have no graph of their kind", True),
        ("mixed batches of 545 .. 1024 tokens have no graph of their kind", False),
    ]
    assert gaps(_settings(32, 1024, 17, mode=CaptureMode.NONE)) == ()
    assert gaps(_settings(64, 128)) == ()


@given(settings_of_graphs())
def test_capture_goes_piecewise_first_and_from_large_to_small(settings: GraphSettings) -> None:
    keys = graph_keys(settings)
    assert len(set(keys)) == len(keys)
    modes = [key.mode for key in keys]
    assert modes == sorted(modes)
    for mode in set(modes):
        sizes = [key.num_tokens for key in keys if key.mode is mode]
        assert sizes == sorted(sizes, reverse=True)


def test_every_mode_captures_what_it_says() -> None:
    kinds = {
        mode.name: {
            (key.mode.name, key.num_sequences is None, key.uniform_query_len) for key in graph_keys(_settings(4, mode=mode))
        }
        for mode in CaptureMode
    }
    assert kinds == {
        "NONE": set(),
        "PIECEWISE": {("PIECEWISE", True, None)},
        "FULL": {("FULL", False, 1), ("FULL", False, None)},
        "FULL_DECODE_ONLY": {("FULL", False, 1)},
        "FULL_AND_PIECEWISE": {("FULL", False, 1), ("PIECEWISE", True, None)},
    }


def test_the_full_graphs_of_mixed_batches_take_the_largest_number_of_sequences() -> None:
    keys = [key for key in graph_keys(_settings(4, mode=CaptureMode.FULL)) if key.uniform_query_len is None]
    assert [(key.num_tokens, key.num_sequences) for key in keys] == [(8, 4), (4, 4), (2, 4), (1, 4)]


@pytest.mark.parametrize(
    ("mode", "num_tokens", "query_len"),
    [("NONE", 1, None), ("FULL", 0, None), ("FULL", 4, 3), ("FULL", 4, 0), ("PIECEWISE", 4, 2), ("PIECEWISE", -1, None)],
)
def test_a_key_of_no_graph_is_refused(mode: str, num_tokens: int, query_len: int | None) -> None:
    with pytest.raises(ValueError, match=r"^no "):
        make_key(RuntimeMode[mode], num_tokens, max_sequences=4, uniform_query_len=query_len)


def test_a_key_reads_well_in_a_log() -> None:
    keys = graph_keys(_settings(2, mode=CaptureMode.FULL))
    assert [str(key) for key in keys[:3]] == [
        "FULL 4 tokens 2 sequences",
        "FULL 2 tokens 2 sequences",
        "FULL 2 tokens 2 sequences of 1",
    ]
