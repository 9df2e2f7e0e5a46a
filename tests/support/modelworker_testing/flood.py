"""A program of several clients that each send huge steps, one after the other. Prints [code, details] of each answer."""

import json
import os
import sys
import threading

import grpc

from modelworker_testing.steps import varint

NUM_CLIENTS = 8
NUM_STEPS = 3
NUM_BYTES = 60 * 2**20
EXECUTE_STEP = "/modelworker.v1.ModelWorker/ExecuteStep"

_BLOCK_IDS, _SAMPLE, _SAMPLING, _LOGPROBS_MODE = 13, 14, 15, 11


def field_of(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def huge_steps() -> tuple[bytes, bytes, bytes]:
    """Steps that consist of one array each. What they would cost to parse differs."""
    ones = b"\1" * NUM_BYTES
    return field_of(_BLOCK_IDS, ones), field_of(_SAMPLE, ones), field_of(_SAMPLING, field_of(_LOGPROBS_MODE, ones))


def main() -> None:
    address = sys.argv[1]
    steps = huge_steps()
    answers: list[tuple[str, str]] = []

    def send(step: bytes) -> None:
        with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
            for _ in range(NUM_STEPS):
                try:
                    channel.unary_unary(EXECUTE_STEP)(step, timeout=120)
                except grpc.RpcError as error:
                    answers.append((error.code().name, error.details()))

    os.nice(5)  # The worker's own time is what counts.
    clients = [threading.Thread(target=send, args=(steps[number % len(steps)],)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
