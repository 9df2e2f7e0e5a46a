"""One call as a servicer sees it, and how many of them may be there at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from modelworker.worker.errors import OverloadedError

# When many large requests are there at once, the first of them is answered in about this time.
_RETRY_WHILE_FULL_MS = 50


class CallContext:
    """gRPC's context of a call with some facts beside it. Everything else is gRPC's own.

    Attributes:
        raw: the request's bytes; empty for a stream of requests.
        arrival_ns: `time.monotonic_ns()` before anything was done with them.
        parse: makes bytes a message of the method, after checking their number; raises InvalidStepError or UnavailableError.
    """

    def __init__(self, context: Any, *, raw: bytes, arrival_ns: int, parse: Callable[[bytes], Any]) -> None:
        self._context = context
        self.raw = raw
        self.arrival_ns = arrival_ns
        self.parse = parse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class RequestRoom:
    """Bounds the bytes of all requests that are being parsed or wait for their answer. Lives on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts a request's bytes.

        Raises:
            OverloadedError: there are too many already.
        """
        total = self._num_bytes + num_bytes
        if total > self._max_bytes:
            raise OverloadedError(
                f"{total} bytes of requests are there at once, the limit is {self._max_bytes}", retry_after_ms=_RETRY_WHILE_FULL_MS
            )
        self._num_bytes = total

    def give_back(self, num_bytes: int) -> None:
        """Ends what `take` began."""
        self._num_bytes -= num_bytes

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """Counts a request's bytes while its call goes on; errors as `take`."""
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)
