"""Two hundred clients of every kind, for a while: `python -m modelworker_testing.crowd ADDRESS SECONDS`.

The worker serves `save_table_model` with `WANTED`, so that the right answer to every good step is known. Prints one JSON object.
"""

import asyncio
import collections
import contextlib
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto.model_worker_pb2_grpc import ModelWorkerStub
from modelworker.worker.client import build_step
from modelworker_testing.checkpoints import random_table

WANTED = random_table(3)
BEST = WANTED.argmax(-1).tolist()
NUM_BLOCKS = 512
KINDS = {"good": 80, "streaming": 20, "bad": 40, "cancelling": 30, "slow": 20, "huge": 10}

Outcomes = collections.Counter[str]


def decode(tokens: list[int], first_block: int) -> pb.ExecuteStepRequest:
    size = len(tokens)
    blocks = [(first_block + row) % (NUM_BLOCKS - 1) + 1 for row in range(size)]
    return build_step(query_lens=[1] * size, context_lens=[0] * size, token_ids=tokens, block_counts=[1] * size, block_ids=blocks)


async def good(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    tokens = [chance.randrange(101) for _ in range(chance.randrange(1, 9))]
    try:
        answer = await stub.ExecuteStep(decode(tokens, chance.randrange(400)), timeout=30)
    except grpc.aio.AioRpcError as error:
        outcomes[f"good {error.code().name}"] += 1
        await asyncio.sleep(0.05)
    else:
        outcomes["good right" if list(answer.sampled_ids) == [BEST[token] for token in tokens] else "good WRONG"] += 1


async def streaming(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    """Has several steps in flight, a bad one among them at times, and goes away before the last answers at times."""
    steps = [[chance.randrange(101) for _ in range(chance.randrange(1, 9))] for _ in range(chance.randrange(1, 9))]
    bad_one = chance.randrange(20)
    call = stub.ExecuteSteps(timeout=30)
    for index, tokens in enumerate(steps):
        request = decode(tokens, chance.randrange(400))
        request.client_tag = index
        if index == bad_one:
            request.token_ids[0] = -5
        await call.write(request)
    await call.done_writing()
    for index in range(chance.randrange(1, len(steps) + 1) if chance.random() < 0.3 else len(steps)):
        answer = await call.read()
        right = [BEST[token] for token in steps[index]]
        if answer.client_tag == index and answer.WhichOneof("result") == "ok":
            outcomes["stream right" if list(answer.ok.sampled_ids) == right else "stream WRONG"] += 1
        else:
            outcomes[f"stream {'bad' if index == bad_one else 'good'} {answer.error.code}"] += 1
    call.cancel()


async def bad(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    request = decode([chance.randrange(101)], 1)
    spoil: Callable[[], object] = chance.choice([
        lambda: request.token_ids.append(5), lambda: request.query_lens.append(-1), lambda: request.block_ids.append(2**31 - 1),
        lambda: request.MergeFromString(b"\xfa\x7f\x03abc"), lambda: request.lora_index.append(1), request.block_counts.pop,
    ])  # fmt: skip
    spoil()
    outcomes[f"bad {await code_of(stub.ExecuteStep(request, timeout=30))}"] += 1


async def cancelling(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    call = stub.ExecuteStep(decode([1, 2, 3], chance.randrange(400)), timeout=30)
    await asyncio.sleep(chance.random() * 0.05)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call
    outcomes["cancelling done"] += 1


async def slow(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    """Opens a connection, says little, and goes away without a word."""
    address = sys.argv[1].rpartition(":")
    _, writer = await asyncio.open_connection(address[0], int(address[2]))
    with contextlib.suppress(ConnectionError):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: chance.randrange(25)])
        await writer.drain()
        await asyncio.sleep(chance.random() * 3)
    writer.transport.abort()
    outcomes["slow done"] += 1


async def huge(stub: ModelWorkerStub, chance: random.Random, outcomes: Outcomes) -> None:
    request = pb.ExecuteStepRequest()
    request.MergeFromString(b"\x52\x80\x80\x80\x02" + bytes(4 * 2**20))
    outcomes[f"huge {await code_of(stub.ExecuteStep(request, timeout=30))}"] += 1
    await asyncio.sleep(0.5)


async def code_of(call: Awaitable[object]) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def crowd(address: str, seconds: float) -> Outcomes:
    outcomes: Outcomes = collections.Counter()
    until = time.monotonic() + seconds
    options = [("grpc.use_local_subchannel_pool", 1)]

    async def live(kind: Callable[[ModelWorkerStub, random.Random, Outcomes], Awaitable[None]], seed: int) -> None:
        chance = random.Random(seed)
        async with grpc.aio.insecure_channel(address, options) as channel:
            while time.monotonic() < until:
                await kind(ModelWorkerStub(channel), chance, outcomes)
                await asyncio.sleep(chance.random() * 0.2)

    kinds = [globals()[name] for name, count in KINDS.items() for _ in range(count)]
    await asyncio.gather(*(live(kind, seed) for seed, kind in enumerate(kinds)))
    return outcomes


if __name__ == "__main__":
    print(json.dumps(asyncio.run(crowd(sys.argv[1], float(sys.argv[2])))))
