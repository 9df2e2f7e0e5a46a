"""The health service (grpc.health.v1): "is it alive" and "may it get steps" under the names that probes ask for.

Source: https://github.com/grpc/grpc/blob/master/doc/health-checking.md (Check: an unknown name is NOT_FOUND; Watch: it is
SERVICE_UNKNOWN and the stream stays open).
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelworker.proto import model_worker_pb2

LIVENESS_NAMES = ("", "liveness")
READINESS_NAMES = ("readiness", model_worker_pb2.DESCRIPTOR.services_by_name["ModelWorker"].full_name)

# Of a name that is not known, in the answer: trailing metadata is small.
_MAX_QUOTED_CHARACTERS = 100

_Context = grpc.aio.ServicerContext[Any, Any]


class HealthService(health_pb2_grpc.HealthServicer):
    """Answers health checks. Every name is NOT_SERVING until `update` says otherwise. Used on the event loop only."""

    def __init__(self) -> None:
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        self._statuses: dict[str, int] = dict.fromkeys(LIVENESS_NAMES + READINESS_NAMES, not_serving)
        self._changed = asyncio.Event()
        self._closed = False

    def update(self, *, live: bool, ready: bool) -> bool:
        """Sets all names; watchers hear of it at once.

        Args:
            live: the process and its engine work; a restart would not help.
            ready: the worker takes steps.

        Returns:
            Whether anything changed.
        """
        statuses = {name: _status(live) for name in LIVENESS_NAMES} | {name: _status(ready) for name in READINESS_NAMES}
        if statuses == self._statuses:
            return False
        self._statuses = statuses
        self._wake()
        return True

    def close(self) -> None:
        """Ends all watches after their last status, so that the server does not wait for them."""
        self._closed = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Answers the status of one name."""
        status = self._statuses.get(request.service)
        if status is None:
            names = ", ".join(repr(name) for name in self._statuses)
            asked = repr(request.service[:_MAX_QUOTED_CHARACTERS])
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no health status for {asked}: the names are {names}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: _Context) -> Any:  # noqa: N802
        """Answers the status of every name."""
        return health_pb2.HealthListResponse(  # type: ignore[attr-defined]  # the stubs are older than this message
            statuses={name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        )

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Sends the status of one name, now and whenever it changes."""
        sent: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                yield health_pb2.HealthCheckResponse(status=status)
                sent = status
            elif self._closed:
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _status(serving: bool) -> int:
    return health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
