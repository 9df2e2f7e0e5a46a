"""Steps through a real server whose model's logits are known: sampling, row errors, refusals, restarts."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelworker.worker.client import (
    Client,
    InvalidRequestError,
    KvCacheLostError,
    StepAnswer,
    StepSampling,
    build_step,
)
from modelworker.worker.result import SequenceErrorCode
from modelworker_testing.checkpoints import random_table, save_table_model
from modelworker_testing.slowness import slowness
from modelworker_testing.worker_process import WorkerProcess, worker_process

WANTED = random_table(1)
POISONED = 7
SIZES = ("--block-size", "4", "--num-blocks", "32", "--max-sequences", "8", "--max-tokens-per-step", "64")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_table_model(tmp_path_factory.mktemp("table"), WANTED, poisoned_tokens=(POISONED,))


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[WorkerProcess]:
    with worker_process(model, *SIZES) as process:
        yield process


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client(worker.address) as client:
        yield client


def decode_step(client: Client, tokens: list[int], **fields: Any) -> StepAnswer:
    """One token per row, each in a block of its own."""
    size = len(tokens)
    return client.execute(
        build_step(
            query_lens=[1] * size, context_lens=[0] * size, token_ids=tokens, block_counts=[1] * size,
            block_ids=list(range(1, size + 1)), **fields,
        )
    )  # fmt: skip


def test_greedy_rows_return_the_most_probable_token(client: Client) -> None:
    answer = decode_step(client, [1, 2, 3, 4])
    assert answer.sampled_ids.tolist() == WANTED[[1, 2, 3, 4]].argmax(-1).tolist()


def test_a_seeded_row_gives_the_same_token_alone_in_any_row_and_beside_any_neighbour(client: Client) -> None:
    def sampled(tokens: list[int], row: int, **sampling: Any) -> int:
        size = len(tokens)
        fields = {"temperature": [0.8] * size, "seed": [42] * size, "has_seed": [True] * size} | sampling
        return decode_step(client, tokens, sampling=StepSampling(**fields)).tokens_of_rows[row][0]

    alone = sampled([33], 0)
    assert sampled([33, 1, 2, 3, 4, 5], 0) == alone
    assert sampled([1, 2, 3, 4, 5, 33], 5) == alone
    assert sampled([1, 33, 33], 1, has_seed=[False, True, True]) == alone
    assert sampled([33, 33], 1, temperature=[0.0, 0.8], seed=[9, 42]) == alone


def test_a_greedy_row_beside_a_random_one_is_the_argmax(client: Client) -> None:
    for seed in range(10):
        answer = decode_step(
            client, [20, 21, 22], sampling=StepSampling(temperature=[0.0, 0.7, 1e-5], seed=[seed] * 3, has_seed=[True] * 3)
        )
        assert answer.row_errors == ()
        assert answer.tokens_of_rows[0] == [int(WANTED[20].argmax())]
        assert answer.tokens_of_rows[2] == [int(WANTED[22].argmax())]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf"), 1e-8, -0.5])
def test_temperatures_that_mean_nothing_are_refused_by_name(client: Client, temperature: float) -> None:
    with pytest.raises(InvalidRequestError) as error:
        decode_step(client, [1, 2], sampling=StepSampling(temperature=[0.5, temperature]))
    assert [violation.field for violation in error.value.violations] == ["sampling.temperature[1]"]


@pytest.mark.parametrize("token", [101, 2**31 - 1, -2])
def test_a_token_outside_the_models_rows_is_refused_with_its_place_and_the_next_step_is_fine(client: Client, token: int) -> None:
    with pytest.raises(InvalidRequestError) as error:
        decode_step(client, [1, token, 3])
    assert [violation.field for violation in error.value.violations] == ["token_ids[1]"]
    assert "row 1" in error.value.violations[0].description
    assert decode_step(client, [1, 2, 3]).sampled_ids.tolist() == WANTED[[1, 2, 3]].argmax(-1).tolist()


def test_logprobs_of_the_chosen_token_describe_the_distribution_that_was_asked_for(client: Client) -> None:
    answer = decode_step(
        client, [40, 40, 41],
        sampling=StepSampling(
            temperature=[0.5] * 3, seed=[5] * 3, has_seed=[True] * 3, num_logprobs=[0, 0, -1], logprobs_mode=[0, 1, 0]
        ),
    )  # fmt: skip
    assert answer.logprobs is not None
    token = answer.sampled_ids[0]
    assert answer.sampled_ids[1] == token
    assert answer.logprobs.counts.tolist() == [1, 1, 0]
    assert answer.logprobs.modes.tolist()[:2] == [0, 1]
    expected = [WANTED[40].log_softmax(-1)[token].item(), (WANTED[40] / 0.5).log_softmax(-1)[token].item()]
    np.testing.assert_allclose(answer.logprobs.values, expected, atol=1e-4)


def test_a_poisoned_row_gets_an_error_its_neighbours_their_tokens_and_its_blocks_are_named(client: Client) -> None:
    answer = decode_step(client, [1, POISONED, 3])
    assert answer.sampled_counts.tolist() == [1, 0, 1]
    assert answer.sampled_ids.tolist() == WANTED[[1, 3]].argmax(-1).tolist()
    assert [(error.index, error.code) for error in answer.row_errors] == [(1, SequenceErrorCode.NON_FINITE_LOGITS)]
    assert answer.tainted_block_ids.tolist() == [2]
    assert client.info().counters['sequence_errors_total{code="NON_FINITE_LOGITS"}'] >= 1


def test_an_empty_step_is_answered_and_a_row_without_tokens_is_refused(client: Client) -> None:
    assert len(decode_step(client, []).sampled_counts) == 0
    with pytest.raises(InvalidRequestError) as error:
        client.execute(build_step(query_lens=[0], context_lens=[0], token_ids=[], block_counts=[1], block_ids=[1]))
    assert error.value.violations[0].field == "query_lens[0]"
    assert len(decode_step(client, [1]).sampled_ids) == 1


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ([1, 2, 3, 4], "block_counts[0]"),
        ([1, 2, 3, 4, -1], "block_ids[4]"),
        ([1, 2, 3, 4, 32], "block_ids[4]"),
        ([1, 2, 3, 4, 0], "block_ids[4]"),
        ([1, 2, 3, 4, 4], "block_ids[4]"),
        (list(range(1, 18)), "block_counts[0]"),
    ],
)
def test_block_tables_that_can_not_hold_the_row_are_refused_and_the_cache_is_untouched(
    client: Client, table: list[int], field: str
) -> None:
    """20 tokens need 5 of the 31 usable blocks of 4."""
    with pytest.raises(InvalidRequestError) as error:
        client.execute(
            build_step(query_lens=[20], context_lens=[0], token_ids=[1] * 20, block_counts=[len(table)], block_ids=table)
        )
    assert field in [violation.field for violation in error.value.violations]


def test_a_sequence_at_the_models_full_length_can_not_go_on(client: Client) -> None:
    table = list(range(1, 17))
    client.execute(build_step(query_lens=[64], context_lens=[0], token_ids=[1] * 64, block_counts=[16], block_ids=table))
    with pytest.raises(InvalidRequestError, match="64"):
        client.execute(build_step(query_lens=[1], context_lens=[64], token_ids=[1], block_counts=[16], block_ids=table))


def test_the_first_step_after_readiness_is_not_slow(model: Path) -> None:
    with worker_process(model, *SIZES) as process, Client(process.address) as client:
        seconds = []
        for _ in range(21):
            begun = time.perf_counter()
            decode_step(client, [1, 2, 3])
            seconds.append(time.perf_counter() - begun)
    # The first call also opens the connection: it gets 100 ms beside three times the median.
    assert seconds[0] < (3 * float(np.median(seconds[1:])) + 0.1) * slowness()


def test_a_restart_is_a_new_epoch_in_which_the_old_ones_steps_are_refused(model: Path) -> None:
    with worker_process(model, *SIZES) as process, Client(process.address) as client:
        old_epoch = client.info().worker_epoch
    with worker_process(model, *SIZES) as process, Client(process.address) as client:
        epoch = client.info().worker_epoch
        assert epoch not in (0, old_epoch)
        with pytest.raises(KvCacheLostError) as error:
            decode_step(client, [1], worker_epoch=old_epoch, router_id=5, step_id=1)
        assert error.value.metadata["worker_epoch"] == str(epoch)
        assert decode_step(client, [1], worker_epoch=epoch, router_id=5, step_id=1).step_id == 1
        assert client.info().next_step_id == 2


def test_all_steps_run_on_one_thread_and_memory_stays_flat(client: Client, worker: WorkerProcess) -> None:
    def resident_bytes() -> int:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))

    def num_threads() -> int:
        return len(list(Path(f"/proc/{worker.process.pid}/task").iterdir()))

    for _ in range(50):
        decode_step(client, [1, 2, 3])
    memory, threads = resident_bytes(), num_threads()
    for _ in range(500):
        decode_step(client, [1, 2, 3], sampling=StepSampling(temperature=[0.5] * 3))
    assert resident_bytes() - memory < 5 * 2**20
    # grpc's own pollers come and go.
    assert num_threads() <= threads + 2
