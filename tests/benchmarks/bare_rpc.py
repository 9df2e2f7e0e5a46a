"""A bare gRPC server, which holds each call as long as it is told and sends back how long that was: what any worker's calls cost.

    python tests/benchmarks/bare_rpc.py

Prints its port. A request is a double, the seconds; an answer is one, too. The time passes on another thread, asleep, so nothing is
computed, parsed or kept.
"""

import asyncio
import queue
import struct
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

SERVICE = "bare.Rpc"
CALL, STREAM = "Hold", "HoldEach"

_Work = queue.SimpleQueue[tuple[float, "asyncio.Future[float]"]]


def hold_all(work: _Work, loop: asyncio.AbstractEventLoop) -> None:
    """Is the other thread."""
    while True:
        seconds, held = work.get()
        begun = time.perf_counter()
        time.sleep(seconds)
        loop.call_soon_threadsafe(held.set_result, time.perf_counter() - begun)


async def main() -> None:
    """Serves until the process is ended."""
    loop = asyncio.get_running_loop()
    work: _Work = queue.SimpleQueue()
    threading.Thread(target=hold_all, args=(work, loop), daemon=True).start()

    async def hold(request: bytes) -> bytes:
        held: asyncio.Future[float] = loop.create_future()
        work.put((*struct.unpack("d", request), held))
        return struct.pack("d", await held)

    async def call(request: bytes, context: Any) -> bytes:
        return await hold(request)

    async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(await hold(request))

    server = grpc.aio.server()
    writing: Any = stream
    handlers = {CALL: grpc.unary_unary_rpc_method_handler(call), STREAM: grpc.stream_stream_rpc_method_handler(writing)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
