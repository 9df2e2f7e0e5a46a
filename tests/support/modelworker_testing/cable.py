"""A connection that breaks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress


class Cable:
    """A TCP connection to the worker that is cut after a number of bytes has passed, counted in both directions."""

    def __init__(self, port: int, lengths: Iterator[int]) -> None:
        self._port = port
        self._lengths = lengths
        self.num_cuts = 0

    @asynccontextmanager
    async def plugged_in(self) -> AsyncIterator[str]:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._carry(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        left = [next(self._lengths, None)]
        directions = [
            asyncio.create_task(self._pump(reader, upstream_writer, left)),
            asyncio.create_task(self._pump(upstream_reader, writer, left)),
        ]
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)
            for each in (writer, upstream_writer):
                each.transport.abort()
                with suppress(OSError):
                    await each.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int | None]) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                if left[0] is not None and len(data) >= left[0]:
                    writer.write(data[: left[0]])
                    await writer.drain()
                    self.num_cuts += left[0] > 0
                    left[0] = 0
                    return
                if left[0] is not None:
                    left[0] -= len(data)
                writer.write(data)
                await writer.drain()
