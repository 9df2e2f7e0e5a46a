"""A worker whose model is a hash chain over the tokens that it finds in its KV cache, and that holds routers to the protocol.

A wrong block, a wrong context length or a stale slot changes every later token.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto.model_worker_pb2_grpc import ModelWorkerServicer

VOCAB_SIZE = 50
EOS = 0
POISON = 49  # A row that computes this token fails, as one with NaN in its logits does. It is never sampled.
FEEDBACK = -1
FAILED = -2
Chain = int


def rows(values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    flat = iter(values)
    return [[next(flat) for _ in range(count)] for count in counts]


def extend(chain: Chain, token_id: int) -> Chain:
    return int.from_bytes(hashlib.blake2b(f"{chain}:{token_id}".encode(), digest_size=8).digest(), "little")


def sample(chain: Chain, position: int, seed: int | None) -> int:
    drawn = chain if seed is None else extend(extend(chain, seed), position)
    return drawn % POISON


def chain_of(token_ids: Sequence[int]) -> Chain:
    chain = 1
    for token_id in token_ids:
        chain = extend(chain, token_id)
    return chain


class RefusedError(Exception):
    def __init__(self, code: grpc.StatusCode, message: str, *, reason: str = "", retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.status = status_pb2.Status(code=code.value[0], message=message)
        self.code = code
        if reason:
            self._add(error_details_pb2.ErrorInfo(reason=reason))
        if retry_ms is not None:
            delay = error_details_pb2.RetryInfo()
            delay.retry_delay.FromMilliseconds(retry_ms)
            self._add(delay)

    def _add(self, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        self.status.details.append(packed)


@dataclass
class Slot:
    position: int = -1
    token_id: int = -1
    chain: Chain = -1


TAINTED = Slot(position=-2)


@dataclass
class ChainWorker(ModelWorkerServicer):
    """Executes steps on a dictionary of slots, keeps the last answers for retries, and notes every breach of the protocol.

    `faults` names what goes wrong at the calls of ExecuteStep to come: "" nothing, "busy" refused with RetryInfo, "refused" as
    malformed, "lost answer"
    executed but answered UNAVAILABLE, "not executed" UNAVAILABLE at once, "lost KV" a new epoch before the step, "fault" a new
    epoch after it and INTERNAL, "taint" a living row's block is reported as tainted.
    """

    block_size: int = 4
    num_blocks: int = 33
    max_model_len: int = 64
    max_sequences: int = 8
    max_tokens_per_step: int = 32
    max_feedback_sequences: int = 8
    model_name: str = "chain"
    faults: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    epoch: int = 1000
    # Left out where hypothesis shows an example: together they are long.
    slots: dict[int, Slot] = field(default_factory=dict, repr=False)
    answers: dict[int, tuple[bytes, pb.ExecuteStepResponse]] = field(default_factory=dict, repr=False)
    lease_holder: int = 0
    num_executed: int = 0
    num_copies: int = 0
    num_feedback_tokens: int = 0
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def next_step_id(self) -> int:
        return len(self.answers) + 1

    def new_epoch(self) -> None:
        self.epoch += 1
        self.slots = {}
        self.answers = {}
        self.kept = {}

    def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: grpc.ServicerContext) -> pb.WorkerInfo:  # noqa: N802
        del request, context
        info = pb.WorkerInfo(worker_epoch=self.epoch, next_step_id=self.next_step_id, lease_holder=self.lease_holder)
        info.model.name, info.model.vocab_size, info.model.max_model_len = self.model_name, VOCAB_SIZE, self.max_model_len
        info.model.eos_token_ids.append(EOS)
        info.kv_cache.block_size, info.kv_cache.num_blocks = self.block_size, self.num_blocks
        info.limits.max_sequences, info.limits.max_tokens_per_step = self.max_sequences, self.max_tokens_per_step
        info.limits.max_steps_in_flight, info.limits.max_feedback_sequences = 8, self.max_feedback_sequences
        info.capabilities.extend(["history", "ExecuteSteps", "sequence_ids", "finished_sequence_ids", "draft_lens", "block_copies"])
        return info

    def ResetKvCache(  # noqa: N802
        self, request: pb.ResetKvCacheRequest, context: grpc.ServicerContext
    ) -> pb.ResetKvCacheResponse:
        del request, context
        self.new_epoch()
        self.lease_holder = 0
        return pb.ResetKvCacheResponse(worker_epoch=self.epoch)

    def ExecuteStep(  # noqa: N802
        self, request: pb.ExecuteStepRequest, context: grpc.ServicerContext
    ) -> pb.ExecuteStepResponse:
        with self.lock:
            try:
                return self.answer(request)
            except RefusedError as refusal:
                context.set_trailing_metadata((("grpc-status-details-bin", refusal.status.SerializeToString()),))
                context.abort(refusal.code, str(refusal))
        raise AssertionError

    def ExecuteSteps(  # noqa: N802
        self, request_iterator: Iterator[pb.ExecuteStepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExecuteStepsResponse]:
        for request in request_iterator:
            response = pb.ExecuteStepsResponse(step_id=request.step_id, client_tag=request.client_tag)
            with self.lock:
                try:
                    response.ok.CopyFrom(self.answer(request))
                except RefusedError as refusal:
                    if refusal.code is grpc.StatusCode.UNAVAILABLE:
                        context.abort(refusal.code, str(refusal))
                    response.error.ParseFromString(refusal.status.SerializeToString())
            yield response

    def answer(self, request: pb.ExecuteStepRequest) -> pb.ExecuteStepResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "busy":
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", retry_ms=1)
        if fault == "refused":
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "malformed")
        if fault == "not executed":
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "gone")
        if fault == "lost KV":
            self.new_epoch()
        if request.worker_epoch != self.epoch:
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "another epoch", reason="KV_CACHE_LOST")
        content = request.SerializeToString(deterministic=True)
        if request.step_id in self.answers:
            before, response = self.answers[request.step_id]
            if before != content:
                self.breaches.append(f"step {request.step_id} came again with other content")
            return response
        if request.step_id > self.next_step_id:
            # In a pipeline: the one before it was refused.
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "too early", reason="STEP_OUT_OF_ORDER")
        response = self.execute(request, taint=fault == "taint")
        self.answers[request.step_id] = (content, response)
        self.lease_holder = request.router_id
        if fault == "fault":
            self.new_epoch()
            raise RefusedError(grpc.StatusCode.INTERNAL, "the engine failed")
        if fault == "lost answer":
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return response

    def execute(self, request: pb.ExecuteStepRequest, *, taint: bool) -> pb.ExecuteStepResponse:
        self.num_executed += 1
        query_lens, context_lens = list(request.query_lens), list(request.context_lens)
        counts, samples = list(request.block_counts), list(request.sample) or [True] * len(query_lens)
        draft_lens = list(request.draft_lens) or [0] * len(query_lens)
        self.check(request, samples, draft_lens)
        for sequence_id in request.finished_sequence_ids:
            self.kept.pop(sequence_id, None)
        if len(self.kept.keys() | set(request.sequence_ids)) > self.max_feedback_sequences:
            self.breaches.append(f"{len(self.kept)} sequences are kept, and {list(request.sequence_ids)} are named")
        self.copy_blocks(request.block_copies)
        response = pb.ExecuteStepResponse(worker_epoch=self.epoch, step_id=request.step_id)
        response.graph.padded_tokens = sum(query_lens)
        tokens, blocks = iter(request.token_ids), iter(request.block_ids)
        tainted: set[int] = set()
        for row, (query_len, context_len, count) in enumerate(zip(query_lens, context_lens, counts, strict=True)):
            table = [next(blocks) for _ in range(count)]
            new = [next(tokens) for _ in range(query_len)]
            written = {table[position // self.block_size] for position in range(context_len, context_len + query_len)}
            if new[0] == FEEDBACK and (token_id := self.last_token(request, row)) == FAILED:
                response.sequence_errors.add(index=row, code=pb.FEEDBACK_SOURCE_FAILED, message="no token")
                response.sampled_counts.append(0)
                self.kept[request.sequence_ids[row]] = (FAILED, context_len + 1)
                tainted |= written
                continue
            new[0] = token_id if new[0] == FEEDBACK else new[0]
            chains = [self.read_context(row, table, context_len)]
            self.check_history(request, row, table, new)
            for position, token_id in enumerate(new, context_len):
                chains.append(extend(chains[-1], token_id))
                self.slots[self.slot(table, position)] = Slot(position, token_id, chains[-1])
            failed = POISON in new or self.reads_tainted(table, context_len)
            if failed:
                if request.sequence_ids:
                    self.kept[request.sequence_ids[row]] = (FAILED, context_len + query_len)
                response.sequence_errors.add(index=row, code=pb.NON_FINITE_LOGITS, message="not finite")
                tainted |= written
            sampled = self.verify(request, row, chains, new, draft_lens[row]) if samples[row] and not failed else []
            response.sampled_counts.append(len(sampled))
            response.sampled_ids.extend(sampled)
            if sampled and request.sequence_ids:
                end = context_len + query_len - (1 + draft_lens[row] - len(sampled))
                self.kept[request.sequence_ids[row]] = (sampled[-1], end)
            if taint and row == 0:
                tainted |= written
        for block_id in tainted:
            for offset in range(self.block_size):
                self.slots[block_id * self.block_size + offset] = TAINTED
        response.tainted_block_ids.extend(sorted(tainted))
        return response

    def verify(self, request: pb.ExecuteStepRequest, row: int, chains: list[Chain], new: list[int], num_drafts: int) -> list[int]:
        """Samples after the last token that is no draft, and goes on while the next draft is what was sampled."""
        sampled = []
        first = len(new) - num_drafts
        for index in range(first, len(new) + 1):
            sampled.append(self.draw(request, row, chains[index], request.context_lens[row] + index))
            if index == len(new) or new[index] != sampled[-1]:
                break
        return sampled

    def last_token(self, request: pb.ExecuteStepRequest, row: int) -> int:
        self.num_feedback_tokens += 1
        token_id, position = self.kept.get(request.sequence_ids[row], (1, -1))
        if position != request.context_lens[row]:
            self.breaches.append(f"row {row} wants the token at {request.context_lens[row]}, the last one is at {position}")
        return token_id

    def copy_blocks(self, copies: pb.BlockCopies) -> None:
        contents = [
            [self.slots.get(source * self.block_size + offset, Slot()) for offset in range(self.block_size)]
            for source in copies.source_ids
        ]
        for destination, content in zip(copies.destination_ids, contents, strict=True):
            for offset, slot in enumerate(content):
                self.slots[destination * self.block_size + offset] = slot
        self.num_copies += len(contents)

    def draw(self, request: pb.ExecuteStepRequest, row: int, chain: Chain, position: int) -> int:
        sampling = request.sampling
        seeded = request.HasField("sampling") and sampling.temperature[row] > 0 and sampling.has_seed[row]
        return sample(chain, position, sampling.seed[row] if seeded else None)

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def reads_tainted(self, table: list[int], context_len: int) -> bool:
        return any(self.slots.get(self.slot(table, position)) is TAINTED for position in range(context_len))

    def read_context(self, row: int, table: list[int], context_len: int) -> Chain:
        chain = 1
        for position in range(context_len):
            slot = self.slots.get(self.slot(table, position), Slot())
            chain = extend(chain, slot.token_id)
            if slot is TAINTED:
                return chain  # The row fails.
            if slot.position != position or slot.chain != chain:
                self.breaches.append(f"row {row} reads position {position} from a slot that holds position {slot.position}")
        return chain

    def check(self, request: pb.ExecuteStepRequest, samples: list[bool], draft_lens: list[int]) -> None:
        query_lens, context_lens, counts = list(request.query_lens), list(request.context_lens), list(request.block_counts)
        num_rows = len(query_lens)
        used = np.array(request.block_ids)
        rules = {
            "an empty step": num_rows > 0,
            "lengths of arrays": len(context_lens) == len(counts) == len(samples) == num_rows,
            "number of tokens": len(request.token_ids) == sum(query_lens),
            "number of blocks": len(used) == sum(counts),
            "a query length": min(query_lens) >= 1,
            "max_sequences": num_rows <= self.max_sequences,
            "max_tokens_per_step": sum(query_lens) <= self.max_tokens_per_step,
            "a block id out of range": used.min() >= 1 and used.max() < self.num_blocks,
            "a block that is written and read by another row": self.owners_are_clear(request),
            "drafts": all(not d or (samples[r] and query_lens[r] == 1 + d) for r, d in enumerate(draft_lens)),
            "feedback": all(
                new[0] != FEEDBACK or query_lens[r] == 1 + draft_lens[r]
                for r, new in enumerate(rows(request.token_ids, query_lens))
            ),
            "a router id": request.router_id != 0,
            "max_model_len": all(q + c <= self.max_model_len for q, c in zip(query_lens, context_lens, strict=True)),
            "a table that is too short": all(
                n * self.block_size >= q + c for n, q, c in zip(counts, query_lens, context_lens, strict=True)
            ),
        }
        self.breaches.extend(rule for rule, is_kept in rules.items() if not is_kept)

    def check_history(self, request: pb.ExecuteStepRequest, row: int, table: list[int], new: list[int]) -> None:
        """Penalties need the sequence's tokens: what is sent has to be right, and what is missing known to the worker."""
        if not request.HasField("sampling") or request.sampling.presence[row] == 0 or not (request.sample or [True] * 99)[row]:
            return
        if self.reads_tainted(table, request.context_lens[row]):
            return  # The row fails, and its tokens are gone with the block: the step was sent before its router knew.
        history = request.history
        lengths = [prompt + output for prompt, output in zip(history.prompt_lens, history.output_lens, strict=True)]
        sent = rows(history.token_ids, lengths)[row]
        context_len = request.context_lens[row]
        tokens = [self.slots.get(self.slot(table, position), Slot()).token_id for position in range(context_len)] + new
        if sent != tokens[: len(sent)]:
            self.breaches.append(f"row {row}: the history is {sent}, the tokens are {tokens}")
        if len(sent) < context_len and (not request.sequence_ids or context_len - len(sent) > 8):
            self.breaches.append(f"row {row}: the history ends at {len(sent)}, the context at {context_len}")

    def owners_are_clear(self, request: pb.ExecuteStepRequest) -> bool:
        tables = rows(request.block_ids, request.block_counts)
        holders = Counter(block_id for table in tables for block_id in table)
        written = [
            table[position // self.block_size]
            for table, context_len, query_len in zip(tables, request.context_lens, request.query_lens, strict=True)
            for position in range(context_len, context_len + query_len)
        ]
        return all(holders[block_id] == 1 for block_id in written)
