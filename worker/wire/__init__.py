"""The edge between protocol and worker: requests become checked batches, results become answers.

Everything that comes from outside is looked at here (`parse_*`), and nowhere further in; what leaves is written here (`encode_*`).
"""

from modelworker.worker.wire.capabilities import CAPABILITIES
from modelworker.worker.wire.info import encode_worker_info
from modelworker.worker.wire.release import encode_release_sequences, parse_release_sequences
from modelworker.worker.wire.sizes import check_request_size, check_step_size, max_step_bytes
from modelworker.worker.wire.step import StepIdentity, encode_reset_kv_cache, encode_result, parse_reset_kv_cache, parse_step
from modelworker.worker.wire.stream import encode_stream_answer, read_step_numbers

__all__ = [
    "CAPABILITIES",
    "StepIdentity",
    "check_request_size",
    "check_step_size",
    "encode_release_sequences",
    "encode_reset_kv_cache",
    "encode_result",
    "encode_stream_answer",
    "encode_worker_info",
    "max_step_bytes",
    "parse_release_sequences",
    "parse_reset_kv_cache",
    "parse_step",
    "read_step_numbers",
]
