"""Server reflection (grpc.reflection.v1 and v1alpha) that command-line tools can work with.

grpcurl and ghz ask for the file of a *method* ("package.Service.Method"), which Python's descriptor pool does not know: a symbol
that is a member of another one is answered with the file of its parent.
Source: https://github.com/grpc/grpc/blob/master/doc/server-reflection.md
"""

from typing import Any, cast

import grpc
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from modelworker.proto import model_worker_pb2

_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"


class MemberPool:
    """The look-ups of a descriptor pool, which also find methods, fields, oneofs and enum values: by their parents.

    A wrapper, because a subclass of `DescriptorPool` makes plain pools.
    """

    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802
        """Returns the file of a symbol.

        Raises:
            KeyError: there is no such symbol.
        """
        parent, _, member = symbol.rpartition(".")
        return self._pool.FindFileContainingSymbol(parent if member in self._members(parent) else symbol)

    def _members(self, symbol: str) -> set[str]:
        """Names of a service's methods, a message's fields and oneofs, or an enum's values; empty for anything else."""
        names: set[str] = set()
        for find, tables in (
            (self._pool.FindServiceByName, ("methods_by_name",)),
            (self._pool.FindMessageTypeByName, ("fields_by_name", "oneofs_by_name")),
            (self._pool.FindEnumTypeByName, ("values_by_name",)),
        ):
            try:
                descriptor = find(symbol)
            except KeyError:
                continue
            for table in tables:
                names.update(getattr(descriptor, table))
        return names


def _add_with_dependencies(pool: DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add_with_dependencies(pool, dependency)
    pool.Add(_proto_of(file))


def _proto_of(file: Any) -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    return proto


def _v1_proto() -> descriptor_pb2.FileDescriptorProto:
    """The protocol v1, which has the messages of v1alpha in another package."""
    proto = _proto_of(reflection_pb2.DESCRIPTOR)
    proto.name = "grpc/reflection/v1/reflection.proto"
    proto.package = _V1
    for message in proto.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(f".{_V1ALPHA}.", f".{_V1}.")
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
            method.output_type = method.output_type.replace(f".{_V1ALPHA}.", f".{_V1}.")
    return proto


def add_reflection(server: grpc.aio.Server) -> None:
    """Registers reflection under both names. Called before the server starts."""
    pool = DescriptorPool()
    # The details of an error that came in band: a tool that prints answers asks for their types.
    details = error_details_pb2.DESCRIPTOR
    for file in (model_worker_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR, details):
        _add_with_dependencies(pool, file)
    pool.Add(_v1_proto())
    names = [service.full_name for file in (model_worker_pb2, health_pb2) for service in file.DESCRIPTOR.services_by_name.values()]
    names += [f"{package}.ServerReflection" for package in (_V1, _V1ALPHA)]
    servicer = reflection.aio.ReflectionServicer(names, pool=cast(DescriptorPool, MemberPool(pool)))
    # The messages of both versions have the same bytes, so one handler serves both.
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for package in (_V1, _V1ALPHA):
        services = grpc.method_handlers_generic_handler(f"{package}.ServerReflection", {"ServerReflectionInfo": handler})
        server.add_generic_rpc_handlers((services,))
