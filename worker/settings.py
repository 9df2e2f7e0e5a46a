"""Settings of a worker: frozen, one object per concern, every one a flag and an environment variable of `modelworker serve`.

A field's metadata says how it is shown and parsed by `flags`; nothing else reads the environment. "auto" and None are resolved in
`startup`, which knows the machine and the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelworker.worker.setting_values import (
    comma_separated,
    fraction,
    message_bytes,
    num_threads,
    optimization_level,
    parse_bytes,
    port_number,
    positive_float,
    positive_int,
    positive_ints,
    table_size,
)


def setting(default: Any, text: str, *, parse: Callable[[str], Any] = str, choices: tuple[Any, ...] = (), metavar: str = "") -> Any:
    """Declares a field of a settings class: its default, what `--help` says of it, and how its flag is parsed."""
    return field(default=default, metadata={"help": text, "parse": parse, "choices": choices, "metavar": metavar})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """Which model is served."""

    model: str = setting(
        "", "Hugging Face model directory, or a name on the hub (owner/name; needs the extra `hub`)", metavar="MODEL"
    )
    served_model_name: str = setting("", "name in WorkerInfo; default: the directory's name", metavar="NAME")
    dtype: str = setting(
        "auto",
        "type in which the model computes; auto: the checkpoint's, unless this machine computes bfloat16 slower than float32",
        choices=("auto", "float32", "bfloat16"),
    )
    max_model_len: int | None = setting(
        None,
        "largest context + query length of a sequence; default: what the model was trained for",
        parse=positive_int,
        metavar="TOKENS",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheSettings:
    """How large the KV cache is: the first that is given of num_blocks, memory and fraction."""

    block_size: int = setting(32, "tokens per KV cache block", parse=positive_int, metavar="TOKENS")
    num_blocks: int | None = setting(None, "KV cache blocks, the null block included", parse=positive_int, metavar="N")
    kv_cache_memory: int | None = setting(None, "memory of the KV cache, e.g. 2G", parse=parse_bytes, metavar="BYTES")
    kv_cache_fraction: float = setting(
        0.3,
        "share of the memory that is free after loading the model, used when neither blocks nor memory are given",
        parse=fraction,
        metavar="SHARE",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """What a step may be at most."""

    max_sequences: int = setting(64, "largest number of sequences in a step", parse=positive_int, metavar="N")
    max_tokens_per_step: int = setting(1024, "largest number of new tokens in a step", parse=positive_int, metavar="N")


@dataclass(frozen=True, kw_only=True, slots=True)
class FencingSettings:
    """Order, ownership and safe retries."""

    max_steps_in_flight: int = setting(64, "steps queued or running; more are refused at once", parse=positive_int, metavar="N")
    require_fencing: bool = setting(False, "refuse unsequenced steps (step_id 0)")
    lease_idle_seconds: float = setting(
        30.0, "seconds without a sequenced step after which another router may take over", parse=positive_float, metavar="SECONDS"
    )
    max_replay_memory: int = setting(64 * 2**20, "memory for answers kept for retries", parse=parse_bytes, metavar="BYTES")

    @property
    def max_replays(self) -> int:
        """Answers kept for retries: twice what can be in flight, so that a router that lost them all can ask for them again."""
        return max(8, 2 * self.max_steps_in_flight)


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedbackSettings:
    """Sampled tokens that are kept for token feedback (token id -1)."""

    max_feedback_sequences: int | None = setting(
        None,
        "sequences whose last tokens are kept; a step that would exceed it is refused; default: four times --max-sequences",
        parse=table_size,
        metavar="N",
    )
    feedback_idle_seconds: float = setting(
        180.0,
        "seconds without a step that names it after which a sequence's tokens are dropped",
        parse=positive_float,
        metavar="SECONDS",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSettings:
    """Where the model runs."""

    device: str = setting("auto", "auto: the GPU if there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = setting(
        None,
        "threads that compute on the CPU; default: OMP_NUM_THREADS, else the container's CPU quota",
        parse=num_threads,
        metavar="N",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OpsSettings:
    """Which ops run their own kernels instead of native PyTorch."""

    custom_ops: tuple[str, ...] = setting(
        (),
        "all or none, and +name or -name for single ops, e.g. all,-rms_norm; a value that begins with - needs the form "
        "--custom-ops=-rms_norm; default: all, but none where Inductor compiles for CUDA; names: `modelworker info --ops`",
        parse=comma_separated,
        metavar="LIST",
    )
    cpu_isa: str = setting(
        "auto",
        "instructions that the C++ kernels use; auto: the best that this machine has",
        choices=("auto", "amx_bf16", "avx512_bf16", "avx2", "portable"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSettings:
    """How steps run: compiled, captured, or neither."""

    optimization_level: int = setting(
        2,
        "0: plain modules; 1: compiled pieces; 2: compiled pieces and graphs; 3: the same, with kernels chosen by measurement and "
        "a graph of every size up to 64 where sizes are not given; it starts slower",
        parse=optimization_level,
        choices=(0, 1, 2, 3),
    )
    enforce_eager: bool = setting(False, "neither compile nor capture; the same as --optimization-level 0")
    graph_mode: str | None = setting(
        None,
        "what is captured; default: FULL_AND_PIECEWISE from optimization level 2 on, else NONE",
        choices=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    )
    decode_query_lens: tuple[int, ...] = setting(
        (1,),
        "query lengths that count as decode and get FULL graphs, e.g. 1,5 for 4 drafts; default: 1",
        parse=positive_ints,
        metavar="LIST",
    )
    decode_graph_sizes: tuple[int, ...] | None = setting(
        None,
        "numbers of tokens that FULL graphs are captured for; default: a ladder up to the largest decode step",
        parse=positive_ints,
        metavar="LIST",
    )
    mixed_graph_sizes: tuple[int, ...] | None = setting(
        None,
        "numbers of tokens that graphs of other batches are captured for; default: a ladder",
        parse=positive_ints,
        metavar="LIST",
    )
    compiler: str = setting(
        "auto",
        "who makes the code of a piece; eager: nobody, its ops are called one by one; auto: inductor",
        choices=("auto", "inductor", "eager"),
    )
    graph_partition: str = setting(
        "fx",
        "who divides the model at attention; fx: the worker, before the compiler sees it; inductor: the compiler, after its "
        "passes, which leaves no pieces to capture: the default of --graph-mode is then FULL_DECODE_ONLY",
        choices=("fx", "inductor"),
    )
    compiler_passes: tuple[str, ...] = setting(
        (),
        "which graph passes run: none, or all but those with a - before their name; a value that begins with - needs the form "
        "--compiler-passes=-read_past_scatter; default: all",
        parse=comma_separated,
        metavar="LIST",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """Where compiled code is kept from one start to the next."""

    cache_dir: str = setting(
        "~/.cache/modelworker", "folder for compiled code; whoever may write there can run code in the worker", metavar="DIR"
    )

    @property
    def folder(self) -> Path:
        """The folder, with ~ replaced where there is a home directory."""
        path = Path(self.cache_dir)
        try:
            return path.expanduser()
        except RuntimeError:
            return path


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """The gRPC server and its logs."""

    host: str = setting("127.0.0.1", "address to listen on; [::] or 0.0.0.0 for all", metavar="ADDRESS")
    port: int = setting(50051, "port to listen on; 0: a free one, printed at start", parse=port_number, metavar="PORT")
    port_file: str = setting("", "write the chosen port into this file once the server listens", metavar="FILE")
    max_message_size: int = setting(64 * 2**20, "largest message, each direction", parse=message_bytes, metavar="BYTES")
    reflection: bool = setting(True, "serve gRPC reflection (grpcurl, ghz)")
    drain_seconds: float = setting(
        25.0,
        "after SIGTERM, how long accepted steps may take; keep it below the pod's grace period",
        parse=positive_float,
        metavar="SECONDS",
    )
    stall_seconds: float = setting(
        60.0, "a step that runs longer than this turns liveness NOT_SERVING until it ends", parse=positive_float, metavar="SECONDS"
    )
    log_format: str = setting("auto", "auto: coloured on a terminal, else JSON", choices=("auto", "json", "console"))
    log_level: str = setting("info", "least severe messages to log", choices=("debug", "info", "warning", "error"))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingSettings:
    """Recording of executed steps, for `modelworker replay`."""

    record_steps: str = setting(
        "", "write every executed step into this new or empty folder; prompts and tokens are in it", metavar="DIR"
    )
    record_steps_limit: int = setting(
        256 * 2**20, "bytes of all recorded steps together; recording stops there", parse=parse_bytes, metavar="BYTES"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Everything `modelworker serve` can be told."""

    model: ModelSettings = field(default_factory=ModelSettings)
    kv_cache: KvCacheSettings = field(default_factory=KvCacheSettings)
    step: StepSettings = field(default_factory=StepSettings)
    fencing: FencingSettings = field(default_factory=FencingSettings)
    feedback: FeedbackSettings = field(default_factory=FeedbackSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)
    ops: OpsSettings = field(default_factory=OpsSettings)
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    recording: RecordingSettings = field(default_factory=RecordingSettings)
