"""Programs as JSON, for the cache."""

import json
from typing import Any

from modelworker.compiler.program import Argument, OpStage, PieceStage, Program, SlotArgument, Stage


def program_to_json(program: Program) -> str:
    """Writes a program."""
    return json.dumps(
        {
            "inputs": program.inputs,
            "bound": program.bound,
            "num_slots": program.num_slots,
            "stages": [_stage_to_object(stage) for stage in program.stages],
            "outputs": program.outputs,
            "returns_tensor": program.returns_tensor,
            "pieces": program.pieces,
        }
    )


def program_from_json(text: str) -> Program:
    """Reads what `program_to_json` wrote."""
    content = json.loads(text)
    return Program(
        inputs=tuple(content["inputs"]),
        bound=tuple(content["bound"]),
        num_slots=content["num_slots"],
        stages=tuple(_stage_from_object(stage) for stage in content["stages"]),
        outputs=tuple(content["outputs"]),
        returns_tensor=content["returns_tensor"],
        pieces=tuple(content["pieces"]),
    )


def _stage_to_object(stage: Stage) -> dict[str, Any]:
    if isinstance(stage, PieceStage):
        return {"piece": stage.piece, "reads": stage.reads, "writes": stage.writes, "releases": stage.releases}
    return {
        "op": stage.op,
        "arguments": [_argument_to_object(argument) for argument in stage.arguments],
        "keywords": [(name, _argument_to_object(argument)) for name, argument in stage.keywords],
        "writes": stage.writes,
        "releases": stage.releases,
    }


def _stage_from_object(content: dict[str, Any]) -> Stage:
    writes, releases = tuple(content["writes"]), tuple(content["releases"])
    if "piece" in content:
        return PieceStage(content["piece"], tuple(content["reads"]), writes, releases)
    return OpStage(
        op=content["op"],
        arguments=tuple(_argument_from_object(argument) for argument in content["arguments"]),
        keywords=tuple((name, _argument_from_object(argument)) for name, argument in content["keywords"]),
        writes=writes,
        releases=releases,
    )


def _argument_to_object(argument: Argument) -> Any:
    if isinstance(argument, list):
        return [_argument_to_object(item) for item in argument]
    return {"slot": argument.slot} if isinstance(argument, SlotArgument) else argument


def _argument_from_object(content: Any) -> Argument:
    if isinstance(content, list):
        return [_argument_from_object(item) for item in content]
    return SlotArgument(content["slot"]) if isinstance(content, dict) else content
