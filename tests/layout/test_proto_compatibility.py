"""The wire never changes under a client: numbers, types, labels and names of what has landed stay, and what goes is reserved.

`proto_baseline.binpb` is the FileDescriptorSet of the landed proto. After a compatible change it is renewed with
`python tests/layout/test_proto_compatibility.py`, which refuses an incompatible one.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("proto_baseline.binpb")

Descriptors = descriptor_pb2.FileDescriptorSet
Message = descriptor_pb2.DescriptorProto
Enum = descriptor_pb2.EnumDescriptorProto
Field = descriptor_pb2.FieldDescriptorProto


def compile_proto(folder: Path) -> Descriptors:
    """The descriptors of folder/model_worker.proto and of everything it imports."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "set.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-Imodelworker/proto={folder}", "--include_imports"]
        subprocess.run([*command, f"--descriptor_set_out={out}", "modelworker/proto/model_worker.proto"], check=True)
        return Descriptors.FromString(out.read_bytes())


def changes(old: Descriptors, new: Descriptors) -> list[str]:
    """Every way in which the new descriptors break who was built with the old ones."""
    old_messages, new_messages = dict(_messages(old)), dict(_messages(new))
    old_enums, new_enums = dict(_enums(old)), dict(_enums(new))
    old_methods, new_methods = dict(_methods(old)), dict(_methods(new))
    found = []
    for kind, before, after in (
        ("message", old_messages, new_messages),
        ("enum", old_enums, new_enums),
        ("rpc", old_methods, new_methods),
    ):
        found += [f"{kind} {name} is gone" for name in before if name not in after]
    for name, message in old_messages.items():
        if name in new_messages:
            found += _field_changes(name, message, new_messages[name])
    for name, enum in old_enums.items():
        if name in new_enums:
            found += _value_changes(name, enum, new_enums[name])
    found += [
        f"rpc {name}: {old_methods[name]} -> {new_methods[name]}"
        for name in old_methods.keys() & new_methods.keys()
        if old_methods[name] != new_methods[name]
    ]
    return found


def _field_changes(name: str, old: Message, new: Message) -> Iterator[str]:
    by_number = {field.number: field for field in new.field}
    for field in old.field:
        now = by_number.get(field.number)
        if now is None:
            if not any(span.start <= field.number < span.end for span in new.reserved_range):
                yield f"{name}.{field.name}: number {field.number} is gone and not reserved"
            if field.name not in new.reserved_name:
                yield f"{name}.{field.name}: the name is gone and not reserved"
        elif (before := _contract(old, field)) != (after := _contract(new, now)):
            yield f"{name}.{field.name}: {before} -> {after}"
    for kept in old.reserved_name:
        if kept not in new.reserved_name:
            yield f"{name}: the name {kept} is no longer reserved"
    for span in old.reserved_range:
        for number in range(span.start, min(span.end, span.start + 10_000)):
            if not any(now.start <= number < now.end for now in new.reserved_range):
                yield f"{name}: the number {number} is no longer reserved"


def _contract(message: Message, field: Field) -> tuple[object, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    packed = field.options.packed if field.options.HasField("packed") else None
    return field.name, field.type, field.type_name, field.label, oneof, field.proto3_optional, packed, field.json_name


def _value_changes(name: str, old: Enum, new: Enum) -> Iterator[str]:
    by_number = {value.number: value.name for value in new.value}
    for value in old.value:
        now = by_number.get(value.number)
        if now is None and not any(span.start <= value.number <= span.end for span in new.reserved_range):
            yield f"{name}.{value.name}: number {value.number} is gone and not reserved"
        elif now is not None and now != value.name:
            yield f"{name}: {value.number} was {value.name} and is {now}"


def _messages(descriptors: Descriptors) -> Iterator[tuple[str, Message]]:
    def nested(prefix: str, message: Message) -> Iterator[tuple[str, Message]]:
        name = f"{prefix}.{message.name}"
        yield name, message
        for inner in message.nested_type:
            yield from nested(name, inner)

    for file in descriptors.file:
        for message in file.message_type:
            yield from nested(file.package, message)


def _enums(descriptors: Descriptors) -> Iterator[tuple[str, Enum]]:
    for file in descriptors.file:
        yield from ((f"{file.package}.{enum.name}", enum) for enum in file.enum_type)
    for name, message in _messages(descriptors):
        yield from ((f"{name}.{enum.name}", enum) for enum in message.enum_type)


def _methods(descriptors: Descriptors) -> Iterator[tuple[str, tuple[object, ...]]]:
    for file in descriptors.file:
        for service in file.service:
            for method in service.method:
                shape = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
                yield f"{file.package}.{service.name}.{method.name}", shape


@pytest.fixture(scope="module")
def current() -> Descriptors:
    return compile_proto(ROOT / "proto")


def test_the_proto_is_compatible_with_the_landed_one(current: Descriptors) -> None:
    assert changes(Descriptors.FromString(BASELINE.read_bytes()), current) == []


def test_the_baseline_holds_the_whole_landed_proto(current: Descriptors) -> None:
    """A field that landed without renewing the baseline would not be protected."""
    assert changes(current, Descriptors.FromString(BASELINE.read_bytes())) == []


OLD = """syntax = "proto3";
package sample.v1;
message Step {
  reserved 7, 20 to 22;
  reserved "former";
  repeated sfixed32 lens = 1;
  int32 count = 2;
  optional float value = 3;
  oneof source { string text = 4; bytes raw = 5; }
  enum Mode { NONE = 0; FULL = 1; }
  Mode mode = 6;
}
message Answer { Step step = 1; }
service Worker { rpc Execute(Step) returns (Answer); rpc Watch(Step) returns (stream Answer); }
"""


def _compiled(tmp_path: Path, text: str) -> Descriptors:
    (tmp_path / "model_worker.proto").write_text(text)
    return compile_proto(tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("int32 count = 2;", "int32 count = 12; reserved 2;", "the name is gone"),
        ("int32 count = 2;", "int64 count = 2;", "Step.count"),
        ("int32 count = 2;", "uint32 count = 2;", "Step.count"),
        ("int32 count = 2;", "int32 number = 2;", "Step.count"),
        ("int32 count = 2;", "repeated int32 count = 2;", "Step.count"),
        ("int32 count = 2;", "optional int32 count = 2;", "Step.count"),
        ("int32 count = 2;", "", "not reserved"),
        ("int32 count = 2;", "reserved 2;", "the name is gone and not reserved"),
        ("int32 count = 2;", 'reserved "count";', "number 2 is gone and not reserved"),
        ("int32 count = 2;", 'int32 count = 2 [json_name = "n"];', "Step.count"),
        ("lens = 1;", "lens = 1 [packed = false];", "Step.lens"),
        ("optional float value", "float value", "Step.value"),
        ("oneof source { string text = 4; bytes raw = 5; }", "string text = 4; bytes raw = 5;", "Step.text"),
        ("FULL = 1;", "WHOLE = 1;", "was FULL and is WHOLE"),
        ("FULL = 1;", "", "FULL: number 1 is gone"),
        ("reserved 7, 20 to 22;", "reserved 7;", "20 is no longer reserved"),
        ("reserved 7, 20 to 22;", "reserved 20 to 22; int32 seven = 7;", "7 is no longer reserved"),
        ('reserved "former";', "", "former is no longer reserved"),
        ("Step step = 1;", "Answer step = 1;", "Answer.step"),
        ("rpc Execute(Step) returns (Answer);", "", "rpc sample.v1.Worker.Execute is gone"),
        ("rpc Execute(Step) returns (Answer);", "rpc Execute(Answer) returns (Answer);", "Worker.Execute"),
        ("returns (stream Answer)", "returns (Answer)", "Worker.Watch"),
        ("package sample.v1;", "package sample.v2;", "message sample.v1.Step is gone"),
    ],
)
def test_an_incompatible_change_is_found(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert OLD.count(before) == 1
    found = changes(_compiled(tmp_path, OLD), _compiled(tmp_path, OLD.replace(before, after)))
    assert any(said in line for line in found), found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("int32 count = 2;", "int32 count = 2; int32 more = 8;"),
        ("int32 count = 2;", 'reserved 2; reserved "count";'),
        ("FULL = 1;", "FULL = 1; PIECES = 2;"),
        ("message Answer {", "message Extra { int32 a = 1; } message Answer {"),
        ("rpc Execute(Step) returns (Answer);", "rpc Execute(Step) returns (Answer); rpc Reset(Step) returns (Answer);"),
    ],
)
def test_a_compatible_change_is_allowed(tmp_path: Path, before: str, after: str) -> None:
    assert changes(_compiled(tmp_path, OLD), _compiled(tmp_path, OLD.replace(before, after))) == []


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    tool = ROOT / "tests" / "tools" / "generate_proto.py"
    subprocess.run([sys.executable, str(tool), str(ROOT), "--into", str(tmp_path)], check=True, capture_output=True)
    stale = [path.name for path in sorted(tmp_path.iterdir()) if path.read_bytes() != (ROOT / "proto" / path.name).read_bytes()]
    assert stale == [], "run `make proto`"


if __name__ == "__main__":
    landed = compile_proto(ROOT / "proto")
    broken = changes(Descriptors.FromString(BASELINE.read_bytes()), landed) if BASELINE.exists() else []
    if broken:
        sys.exit("\n".join(broken))
    BASELINE.write_bytes(landed.SerializeToString(deterministic=True))
