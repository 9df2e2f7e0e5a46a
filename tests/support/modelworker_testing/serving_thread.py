"""A server on a thread of its own, for tests that call it as another program would."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from modelworker.worker.settings import WorkerSettings
from modelworker_testing.serving import Running, running_server


@contextmanager
def server_on_a_thread(settings: WorkerSettings | None = None) -> Iterator[str]:
    """Serves a `SumEngine` until the block ends; yields the address. An error of the server is raised at the end."""
    addresses: list[str] = []
    errors: list[BaseException] = []
    is_there, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_server(settings) as running:
            addresses.append(running.address)
            is_there.set()
            await asyncio.to_thread(is_over.wait)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            errors.append(error)
        finally:
            is_there.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert is_there.wait(60), "the server is not ready after 60 s"
        if addresses:
            yield addresses[0]
    finally:
        is_over.set()
        thread.join()
        for error in errors:
            raise error


@contextmanager
def served_in_thread(settings: WorkerSettings | None = None) -> Iterator[Running]:
    """The worker's server on another thread's event loop, for blocking clients."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running_server(settings)
    try:
        running = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
