"""Public reports as pairs of exported runs, so that the explainer can be asked about a cause that is known.

A pair starts from one run (`hosts.base`): really recorded, put onto the runtime and the kind of host that the report
names. Then, in this order: evidence is chosen from what the report says was seen (`evidence.TABLE`); harmless fields are
drawn at random; the deciding fields get two values. The first two steps do not look at the deciding fields; only a
harmless field that happens to be a deciding one is drawn again.

A truth is a set: the report's deciding facts that are fields here, all of which differ. With ``first`` only the one that
the report names first differs, which is harder: nothing else helps to guess it.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from provenance.catalogue.fields import spec, table
from provenance.explain import conditions
from provenance.facts import Field, Run, Sequence, State
from provenance.store import export
from tests.fakes.runs import key
from tests.incidents import evidence, homes, hosts, values
from tests.incidents.homes import Case

CERTAIN = ("stated", "argued")
HARMLESS = 12
MORE_HARMLESS = 8
MOST_ROWS = 16
IDS = "input.token_ids"
# What really drifts from one machine or day to the next and decides nothing.
DRIFT = (
    "context.host", "context.pid", "context.thread_id", "context.call_index", "os.kernel", "cpu.microcode",
    "memory.total_bytes", "cpu.cgroup_quota", "numa.nodes", "python.version", "app.program", "app.code_version",
    "gpu.0.uuid_digest", "gpu.0.vbios", "gpu.0.temperature", "gpu.0.sm_clock", "gpu.0.utilization", "gpu.nvml_version",
    "env.HF_HOME", "env.LANG", "env.TOKENIZERS_PARALLELISM", "lib.all_digest", "lib.psutil.version",
    "lib.nvidia-ml-py.version", "lib.huggingface-hub.version", "lib.safetensors.version", "lib.numpy.version", "os.libc",
    "loaded.libc.path", "loaded.torch_cpu.path", "loaded.libstdcxx", "model.name_or_path", "weights.path",
    "lib.shadowed_libs_digest", "generation.streamer", "generation.transformers_version",
)  # fmt: skip
# Fields that conditions of others look at: to change them would change what can matter.
CONDITIONS = {
    "device.in_use", "model.dtype", "model.module_kinds", "model.attn_implementation", "generation.do_sample",
    "generation.mode", "generation.num_beams", "generation.num_beam_groups", "generation.guidance_scale",
    "generation.watermarking_config", "generation.prompt_lookup_num_tokens", "generation.assistant_model",
    "generation.cache_implementation", "torch.compile.active", "torch.deterministic_algorithms", "model.training",
    "model.quantization_config.quant_method", "adapter.names", "env.WORLD_SIZE", "batch.size", "rocm.version",
    "model.is_encoder_decoder", "input.empty", "torch.autocast.cpu", "torch.autocast.cuda", "rng.consumed",
}  # fmt: skip
SAMPLED: dict[str, dict[str, Any]] = {
    "transformers": hosts.WORDS["sample"] | {"generation.temperature": 0.8},
    **{runtime: {name: 0.8} for runtime, name in hosts.LIVE_SAMPLING.items()},
}
A_ID, B_ID = "01a00000-0000-7000-8000-00000000000a", "01b00000-0000-7000-8000-00000000000b"


@lru_cache(maxsize=4)
def cases(path: Path = homes.HERE / "cases.jsonl") -> tuple[Case, ...]:
    """Return the cases whose cause was stated or argued, of this set or of another file of the same form."""
    return tuple(case for case in homes.cases(path) if case.confidence in CERTAIN)


def deciding(case: Case) -> list[str]:
    """Name the deciding fields of a case in a run, in the report's order. What is no field here is left out."""
    found = [homes.home(word, case.runtime) for word in case.deciding if homes.has_home(word, case.runtime)]
    return list(dict.fromkeys(values.named(item.field) for item in found if item.field)) or [IDS]


def make(case: Case, seed: int, *, first: bool = False) -> tuple[Run, Run, list[str]]:
    """Make both runs of a pair, as read back from their exported documents, and the names of the fields that did it."""
    one, other, truth = documents(case, seed, first=first)
    return export.read(one, "A"), export.read(other, "B"), truth


def documents(case: Case, seed: int, *, first: bool = False) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Make a pair as exported documents."""
    rng = random.Random(f"{case.id} {seed}")
    names = deciding(case)
    wanted = [name for name in names if name != IDS][:1] or names if first else names
    a = hosts.base(case, names)
    runtime = hosts.family(case, names)
    kind = evidence.kind(case, runtime)
    if kind == "sampled":
        for name, value in SAMPLED.get(runtime, {}).items():
            a[name] = Field(name, value)
    b = dict(a)
    shown = evidence.sequences(kind, str(a["model.dtype"].value), _has_logits(runtime, rng), rng)
    drawn, count = _harmless(a, runtime, rng), HARMLESS + rng.randrange(MORE_HARMLESS + 1)
    changed = [item for name in wanted if name != IDS for item in values.differ(name, a, b, rng)]
    for name in _still_harmless(drawn, a, b, runtime, set(names) | set(changed))[:count]:
        values.differ(name, a, b, rng)
    one, other = _placed(shown, runtime, changed, a, b, rng)
    apart = shown.a.input_ids != shown.b.input_ids
    truth = [name for name in wanted if name != IDS] + [IDS] * (IDS in names and apart)
    return _document(A_ID, runtime, a, one), _document(B_ID, runtime, b, other), truth


def _has_logits(runtime: str, rng: random.Random) -> bool:
    """Say whether top logits were recorded: always where we stand in the loop, by request in an engine."""
    return runtime == "transformers" or rng.random() < 0.5


# -- harmless fields ----------------------------------------------------------------------------------


def _harmless(fields: dict[str, Field], runtime: str, rng: random.Random) -> list[str]:
    """Put the fields that can do nothing here into a random order, those that drift mixed in."""
    run = _run(runtime, fields)
    drift = [name for name in DRIFT if name in fields or spec(name).effect == "none"]
    idle = [name for name in hosts.known(fields) if name not in CONDITIONS and name not in drift and _idle(name, run)]
    rng.shuffle(drift)
    rng.shuffle(idle)
    mixed = drift[: rng.randrange(6, 11)] + idle
    head = mixed[: HARMLESS + MORE_HARMLESS]
    rng.shuffle(head)
    return head + mixed[len(head) :] + drift[10:]


def _idle(name: str, run: Run) -> bool:
    declared = spec(name)
    return declared.effect == "none" or conditions.active(declared.active_when, run) is False


def _still_harmless(
    drawn: list[str], a: dict[str, Field], b: dict[str, Field], runtime: str, taken: set[str]
) -> list[str]:
    """Keep of those drawn what is idle on both sides now, and not deciding itself."""
    one, other = _run(runtime, a), _run(runtime, b)
    return [
        name for name in drawn
        if name not in taken and (name in DRIFT or (_idle(name, one) and _idle(name, other)))
        and not set(values.FOLLOWS.get(name, ())) & taken
    ]  # fmt: skip


def _run(runtime: str, fields: dict[str, Field]) -> Run:
    return Run("", "call", runtime, "generate", "ok", 0, 0, fields, ())


# -- sequences ----------------------------------------------------------------------------------------


def _placed(
    shown: evidence.Shown,
    runtime: str,
    changed: Iterable[str],
    a: dict[str, Field],
    b: dict[str, Field],
    rng: random.Random,
) -> tuple[list[Sequence], list[Sequence]]:
    """Put the two sequences into their calls: with neighbours, padding or another row, where those differ."""
    one, other = shown
    names = set(changed)
    dtype = b["model.dtype"].value
    if other.steps and isinstance(dtype, str) and runtime == "transformers":
        other = replace(other, logits_dtype=dtype)
    if any("batch.has_padding" in spec(name).active_when for name in names) or "batch.max_length" in names:
        padding = rng.randrange(3, 20)
        more = rng.randrange(1, 20) if names & {"batch.padding_tokens", "batch.max_length"} else 0
        one, other = replace(one, padding=padding), replace(other, padding=padding + more)
        for fields in (a, b):
            if fields.get("batch.padding_side", Field.unset("")).state is not State.VALUE:
                fields["batch.padding_side"] = Field("batch.padding_side", "left")
    for fields in (a, b):
        fields.pop("batch.padding_tokens", None)
        fields.pop("batch.position", None)
    if runtime != "transformers":
        return [one], [replace(other, row=1) if "batch.position" in names else other]
    neighbours = [
        _neighbour(row, rng) for row in range(1, MOST_ROWS)
    ]  # the same on both sides, as far as both have them
    strangers = (
        [_neighbour(row, rng) for row in range(1, MOST_ROWS)] if "batch.sequence_lengths" in names else neighbours
    )
    rows = [[one, *neighbours[: _rows(a) - 1]], [other, *strangers[: _rows(b) - 1]]]
    for fields, row in zip((a, b), rows, strict=True):
        lengths = [len(item.input_ids or ()) for item in row]
        fields["batch.sequence_lengths"] = Field("batch.sequence_lengths", lengths)
        fields["batch.max_length"] = Field("batch.max_length", max(lengths[0] + (row[0].padding or 0), *lengths))
    if "batch.position" in names and len(rows[1]) > 1:
        here = rows[1][0]
        rows[1] = [replace(rows[1][1], row=0), replace(here, row=1), *rows[1][2:]]
    return rows[0], rows[1]


def _rows(fields: dict[str, Field]) -> int:
    size = fields["batch.size"].value
    return min(size, MOST_ROWS) if isinstance(size, int) else 1


def _neighbour(row: int, rng: random.Random) -> Sequence:
    ids = tuple(rng.randrange(evidence.VOCABULARY) for _ in range(rng.randrange(10, 24)))
    return Sequence(row, 0, key("in", ids), key("out", ids[:5]), ids, ids[:5], finish="length", padding=0)


def _document(run_id: str, runtime: str, fields: dict[str, Field], rows: list[Sequence]) -> dict[str, Any]:
    run = Run(
        run_id, "call", runtime, "call" if runtime == "function" else "generate", "ok", 1_790_000_000_000_000_000,
        812_345_678, fields, tuple(rows), key_id="0b" * 8,
    )  # fmt: skip
    return export.document(run)


# -- taking away --------------------------------------------------------------------------------------


def without(run: Run, names: Iterable[str]) -> Run:
    """Return the run with fields unknown: those named, and what only follows from them."""
    gone = set(names)
    gone |= {item for name in gone for item in values.FOLLOWS.get(name, ())}
    fields = {
        name: Field.unknown(name, "not read in this run") if name in gone else item for name, item in run.fields.items()
    }
    for name in gone:
        if name not in fields and name in table():
            fields[name] = Field.unknown(name, "not read in this run")
    rows = run.sequences
    if gone & {"batch.padding_tokens", "batch.padding_side", "batch.max_length", "batch.size"}:
        rows = tuple(replace(item, padding=None) for item in rows)
    if IDS in gone:
        rows = tuple(replace(item, input_ids=None, input_key="", input_text=None) for item in rows)
    return replace(run, fields=fields, sequences=rows)
