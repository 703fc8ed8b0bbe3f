"""Runs made by hand, with a dial for each thing that the explainer looks at."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from hashlib import sha256
from typing import Any

from provenance.facts import Field, Run, Sequence, State, Step

BASE: dict[str, Any] = {
    "device.in_use": ["cpu"], "model.dtype": "bfloat16", "model.attn_implementation": "sdpa", "model.training": False,
    "model.is_encoder_decoder": False, "model.module_kinds": [], "torch.compile.active": False,
    "torch.deterministic_algorithms": False, "torch.autocast.cpu": "off", "torch.autocast.cuda": "off",
    "weights.loaded_root": "p1:sha256:" + "1" * 64, "generation.do_sample": False, "generation.mode": "greedy_search",
    "generation.num_beams": 1, "generation.temperature": 1.0, "generation.top_k": 50, "generation.top_p": 1.0,
    "generation.repetition_penalty": 1.0, "generation.max_new_tokens": 20, "batch.size": 1, "batch.max_length": 4,
    "batch.sequence_lengths": [4], "rng.consumed": False, "rng.torch_cpu_state_sha256": "sha256:" + "a" * 64,
    "seed.torch_initial": 7, "torch.num_threads": 2, "torch.version": "2.13.0", "lib.transformers.version": "5.24.0",
    "cpu.model": "a CPU", "context.call_index": 1, "tokenizer.sha256": "sha256:" + "c" * 64,
}  # fmt: skip


def run(
    outputs: Many[Many[int]] = ((5, 6, 7),),
    inputs: Many[Many[int]] = ((1, 2, 3, 4),),
    steps: Many[Many[Step]] | None = None,
    fields: Mapping[str, Any] | None = None,
    **more: Any,
) -> Run:
    """Make a run. ``fields`` overrides; a `Field` stands as it is, None removes."""
    table = {name: Field(name, value) for name, value in BASE.items()}
    for name, value in (fields or {}).items():
        if value is None:
            table.pop(name, None)
        else:
            table[name] = value if isinstance(value, Field) else Field(name, value)
    made = tuple(
        sequence(row, ids, outputs[row], steps[row] if steps is not None else default_steps(outputs[row]))
        for row, ids in enumerate(inputs)
    )
    facts: dict[str, Any] = {"run_id": "01a00000-0000-7000-8000-000000000001", "kind": "call", "runtime": "transformers",
                             "operation": "generate", "status": "ok", "started_at": 1, "duration_ns": 1,
                             "key_id": "0b" * 8}  # fmt: skip
    facts.update(more)
    return Run(fields=table, sequences=made, **facts)


def sequence(row: int, ids: Many[int], output: Many[int], steps: Many[Step], **more: Any) -> Sequence:
    """Make one sequence; its keys follow from its ids, as equal ids have equal keys."""
    facts: dict[str, Any] = {"input_key": key("in", ids), "output_key": key("out", output), "finish": "length",
                             "padding": 0, "logits_dtype": "bfloat16"}  # fmt: skip
    facts.update(more)
    return Sequence(row=row, ret=0, input_ids=tuple(ids), output_ids=tuple(output), steps=tuple(steps), **facts)


def key(kind: str, ids: Many[object]) -> str:
    """Return a key: equal ids have equal ones."""
    return sha256(f"{kind}{tuple(ids)}".encode()).hexdigest()


def step(token: int, other: int, margin: float, at: float = 16.0, moved: float = 0.0) -> Step:
    """Make one step: the token, its runner-up, the margin between them, and by how much all logits moved."""
    ids, logits = (token, other, 90, 91), (at + moved, at - margin + moved, at - 5 + moved, at - 6 + moved)
    return Step(token, ids, logits, -0.5, margin, other)


def default_steps(output: Many[int]) -> list[Step]:
    """Make steps with wide margins and no movement."""
    return [step(token, 99, 3.0) for token in output]


def unknown(name: str, why: str = "the driver is not loaded") -> Field:
    """Make a field that could not be read."""
    return Field(name, None, State.UNKNOWN, why)
