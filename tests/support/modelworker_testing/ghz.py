"""What the load tester ghz does with its files, from its sources (runner/data.go and runner/config.go)."""

from google.protobuf.message import DecodeError

from modelworker.proto import model_worker_pb2 as pb

# The keys of a config and the types of their values: text, number (unsigned), signed, flag, duration (text), texts, map (of text).
CONFIG_FIELDS = {
    **dict.fromkeys(("proto", "protoset", "call", "host", "name", "debug", "output", "format", "authority", "cname"), "text"),
    **dict.fromkeys(("cacert", "cert", "key", "data-file", "binary-file", "metadata-file"), "text"),
    **dict.fromkeys(("duration-stop", "concurrency-schedule", "load-schedule"), "text"),
    **dict.fromkeys(("total", "skipFirst", "concurrency", "connections", "rps", "cpus", "load-start", "load-end"), "number"),
    **dict.fromkeys(("concurrency-start", "concurrency-end", "stream-call-count"), "number"),
    **dict.fromkeys(("concurrency-step", "load-step"), "signed"),
    **dict.fromkeys(("insecure", "skipTLS", "async", "enable-compression", "stream-dynamic-messages"), "flag"),
    **dict.fromkeys(("duration", "max-duration", "timeout", "stream-interval", "connect-timeout", "keepalive"), "duration"),
    **dict.fromkeys(("concurrency-step-duration", "concurrency-max-duration", "stream-call-duration"), "duration"),
    **dict.fromkeys(("load-step-duration", "load-max-duration"), "duration"),
    "import-paths": "texts",
    **dict.fromkeys(("metadata", "tags", "reflect-metadata"), "map"),
}


def read_binary_file(data: bytes) -> list[pb.ExecuteStepRequest]:
    """Reads a `binary-file` as ghz does.

    It takes messages, each after its length as a varint, until the data end, within a message or not. Only if that fails, or finds
    none, does it take the whole as a single message.
    """
    try:
        messages = _read_prefixed(data)
    except DecodeError:
        messages = []
    return messages or [pb.ExecuteStepRequest.FromString(data)]


def _read_prefixed(data: bytes) -> list[pb.ExecuteStepRequest]:
    messages, at = [], 0
    while True:
        length = shift = 0
        while True:
            if at == len(data):
                return messages
            byte, at = data[at], at + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if at + length > len(data):
            return messages
        messages.append(pb.ExecuteStepRequest.FromString(data[at : at + length]))
        at += length
