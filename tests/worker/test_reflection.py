"""Reflection, spoken as command-line tools speak it: by symbol, methods included, under both names."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2

from modelworker.worker.settings import ServerSettings, WorkerSettings
from modelworker_testing.serving import Running, async_test, running_server

V1, V1ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"
SERVICE = "modelworker.v1.ModelWorker"
both_versions = pytest.mark.parametrize("version", [V1, V1ALPHA])


async def ask(running: Running, version: str, **query: object) -> reflection_pb2.ServerReflectionResponse:
    async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(**query)

    stream = running.channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = [answer async for answer in stream(requests(), timeout=10)]
    return answer


def file_names(answer: reflection_pb2.ServerReflectionResponse) -> list[str]:
    files = answer.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(file).name for file in files]


def pool_of(answer: reflection_pb2.ServerReflectionResponse) -> DescriptorPool:
    pool = DescriptorPool()
    for file in reversed(answer.file_descriptor_response.file_descriptor_proto):
        pool.AddSerializedFile(file)
    return pool


@both_versions
@async_test
async def test_the_services_are_listed_and_each_can_be_described(version: str):
    async with running_server() as running:
        answer = await ask(running, version, list_services="")
        names = [service.name for service in answer.list_services_response.service]
        assert set(names) == {SERVICE, "grpc.health.v1.Health", V1, V1ALPHA}
        for name in names:
            assert file_names(await ask(running, version, file_containing_symbol=name)), name


@both_versions
@pytest.mark.parametrize(
    "symbol",
    [
        SERVICE,
        f"{SERVICE}.ExecuteStep",
        f"{SERVICE}.GetWorkerInfo",
        f"{SERVICE}.ExecuteSteps",
        f"{SERVICE}.ReleaseSequences",
        "modelworker.v1.ExecuteStepRequest",
        "modelworker.v1.ExecuteStepRequest.block_ids",
        "modelworker.v1.ExecuteStepsResponse.result",
        "modelworker.v1.LogprobsMode",
        "modelworker.v1.GraphMode.GRAPH_MODE_FULL",
    ],
)
@async_test
async def test_the_file_of_a_symbol_or_of_its_parent_is_found(version: str, symbol: str):
    async with running_server() as running:
        names = file_names(await ask(running, version, file_containing_symbol=symbol))
        assert "modelworker/proto/model_worker.proto" in names
        assert "google/protobuf/any.proto" in names


@both_versions
@pytest.mark.parametrize("symbol", ["", ".", "modelworker.v1.Nothing", f"{SERVICE}.Nothing", f"{SERVICE}.ExecuteStep.more", "ü"])
@async_test
async def test_an_unknown_symbol_is_not_found(version: str, symbol: str):
    async with running_server() as running:
        answer = await ask(running, version, file_containing_symbol=symbol)
        assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


@both_versions
@async_test
async def test_a_tool_without_the_proto_file_can_call_a_method(version: str):
    async with running_server() as running:
        pool = pool_of(await ask(running, version, file_containing_symbol=f"{SERVICE}.ExecuteStep"))
        method = pool.FindServiceByName(SERVICE).methods_by_name["ExecuteStep"]
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        request = json_format.ParseDict(
            {"queryLens": [2], "contextLens": [0], "tokenIds": [4, 5], "blockCounts": [1], "blockIds": [1]}, request_type()
        )
        call = running.channel.unary_unary(f"/{SERVICE}/ExecuteStep", request_type.SerializeToString, response_type.FromString)
        assert list((await call(request)).sampled_ids) == [9]


@both_versions
@async_test
async def test_reflection_that_is_switched_off_is_unimplemented(version: str):
    async with running_server(WorkerSettings(server=ServerSettings(reflection=False))) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(running, version, list_services="")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@both_versions
@async_test
async def test_a_tool_without_the_proto_file_can_call_a_stream(version: str):
    async with running_server() as running:
        answer = await ask(running, version, file_containing_symbol=f"{SERVICE}.ExecuteSteps")
        pool = pool_of(answer)
        # Details of errors are in band, so that a tool has to print them: it asks for their types.
        details = await ask(running, version, file_containing_symbol="google.rpc.BadRequest")
        known = set(file_names(answer))
        for file in reversed(details.file_descriptor_response.file_descriptor_proto):
            if descriptor_pb2.FileDescriptorProto.FromString(file).name not in known:
                pool.AddSerializedFile(file)
        method = pool.FindServiceByName(SERVICE).methods_by_name["ExecuteSteps"]
        assert (method.client_streaming, method.server_streaming) == (True, True)
        request_type = message_factory.GetMessageClass(method.input_type)
        response_type = message_factory.GetMessageClass(method.output_type)
        call = running.channel.stream_stream(f"/{SERVICE}/ExecuteSteps", request_type.SerializeToString, response_type.FromString)
        body = {"queryLens": [2], "contextLens": [0], "tokenIds": [4, 5], "blockCounts": [1], "blockIds": [1]}
        requests = [json_format.ParseDict(body | {"clientTag": str(tag)}, request_type()) for tag in (1, 2)]
        bad = json_format.ParseDict({"queryLens": [2]}, request_type())

        async def send() -> AsyncIterator[object]:
            for request in (*requests, bad):
                yield request

        answers = [json_format.MessageToDict(each, descriptor_pool=pool) async for each in call(send())]
        assert [each["clientTag"] for each in answers[:2]] == ["1", "2"]
        assert [each["ok"]["sampledIds"] for each in answers[:2]] == [[9], [9]]
        assert answers[2]["error"]["code"] == 3
        assert answers[2]["error"]["details"][0]["fieldViolations"][0]["field"] == "context_lens"
