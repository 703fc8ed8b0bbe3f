"""What rolls at write time: equal inputs and their outputs, and the binding of weights to the calls that ran on them.

The question "which equal inputs gave more than one output" takes seconds over a million runs; kept rolling it
is a look-up, and a batch writes its groups once. A group is equal input, equal settings (by value, whoever set
them), equal random state if sampled, equal tensors, and one place among the answers to a prompt: the second of
three that one call returns is compared with the second of another call, never with its own neighbours. A draw has
its row in the batch too, since each row draws other numbers. A recorded function has its name for settings and tensors.
Where one of these is unknown there is no group: unknown is never equal. What was served from a cache says nothing of
the model, and is counted nowhere.
"""

import hashlib
from typing import Any

from provenance.facts import FINISHES
from provenance.integrity.canonical import raw
from provenance.integrity.digests import file_digest
from provenance.store.pairs import Pairs
from provenance.store.rows import Bulk, Documents, clean

FINISH = dict(enumerate(FINISHES))
COUNTED = ("input_key", "output_key", "prompt_index", "return_index")

# What a late binding must know of a run to count it.
FUNCTION = "function"
LATE = ("id", "started_at", "settings", "random_state", "status", "kind", "environment", "model")

_INPUTS = """insert into equal_inputs(grp, input_key, settings, random_state, weights, runs, outputs, first_run,
    last_run, first_at, last_at, open_run, open_prompt, open_return, open_output, open_environment)
    values(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
    on conflict(grp) do update set runs = equal_inputs.runs + excluded.runs, outputs = excluded.outputs,
    last_run = excluded.last_run, last_at = excluded.last_at, open_run = excluded.open_run,
    open_prompt = excluded.open_prompt, open_return = excluded.open_return, open_output = excluded.open_output,
    open_environment = excluded.open_environment"""
_OUTPUTS = """insert into equal_outputs(grp, output_key, runs, first_run, last_run) values(?,?,?,?,?)
    on conflict(grp, output_key) do update
    set runs = equal_outputs.runs + excluded.runs, last_run = excluded.last_run"""
Span = list[int]  # runs, the first and the last of them


class Groups:
    """The groups that a batch touches: counted here, written with one statement a table."""

    def __init__(self, bulk: Bulk, documents: Documents, host: str = "") -> None:
        self.bulk, self.documents = bulk, documents
        self.pairs = Pairs(bulk, clean(host))
        self.inputs: dict[bytes, tuple[list[Any], Span, Span]] = {}  # what is equal; runs; their times
        self.outputs: dict[bytes, dict[bytes, Span]] = {}

    def count(self, run: dict[str, Any], sequence: dict[str, Any]) -> None:
        """Count one finished sequence, if everything that must be equal is known."""
        settings, weights = run.get("settings"), run.get("weights")
        input_key, output_key = sequence.get("input_key"), sequence.get("output_key")
        plain = run.get("runtime") == FUNCTION  # has neither settings nor tensors, and its name is what was asked
        if not ((plain or (settings and weights)) and input_key and output_key):
            return
        if run["status"] != "ok" or run["kind"] == "cached":
            return
        values = file_digest(f"function {run['operation']}".encode()) if plain else self._values(settings or 0)
        weights, state = 0 if plain else weights, run.get("random_state") or ""
        parts = [bytes(input_key), values.encode(), state.encode(), str(weights).encode()]
        place = (sequence["return_index"], sequence["prompt_index"] if state else 0)
        parts += [str(place).encode()] if any(place) else []
        group = hashlib.sha256(b"provenance/group/v1" + b"\0".join(parts)).digest()
        number, at = run["id"], run["started_at"]
        if group in self.inputs:
            _, runs, times = self.inputs[group]
            runs[0], runs[2], times[1] = runs[0] + 1, number, at
        else:
            self.inputs[group] = [input_key, values, state, weights], [1, number, number], [at, at]
        span = self.outputs.setdefault(group, {}).setdefault(bytes(output_key), [0, number, number])
        span[0], span[2] = span[0] + 1, number
        self.pairs.meet(group, run, sequence)

    def _values(self, settings: int) -> str:
        values = self.documents.values.get(settings)
        if values is None:
            values = str(self.bulk.run("select value_digest from fingerprints where id=?", (settings,))[0][0])
            self.documents.values[settings] = values
        return values

    def write(self) -> None:
        """Add the counts to those of the store."""
        there: dict[bytes, set[bytes]] = {group: set(outputs) for group, outputs in self.outputs.items()}
        for group, output in self.bulk.among("select grp, output_key from equal_outputs where grp", list(there)):
            there[bytes(group)].add(bytes(output))
        waiting = self.pairs.settle(list(self.inputs))
        self.bulk.many(
            _INPUTS,
            [(group, *equal, runs[0], len(there[group]), runs[1], runs[2], *times, *waiting[group])
             for group, (equal, runs, times) in self.inputs.items()],
        )  # fmt: skip
        self.bulk.many(
            _OUTPUTS, [(group, key, *span) for group, outputs in self.outputs.items() for key, span in outputs.items()]
        )
        self.inputs.clear()
        self.outputs.clear()


def drawn_from(facts: dict[str, Any], call: tuple[int, int]) -> str | None:
    """Digest the random states of a sampled call; where they are not all known it is equal to no other call."""
    if not facts.get("sampled"):
        return None
    states = sorted(f"{name}={facts[name]}" for name in facts if name.startswith("rng.") and "sha256" in name)
    if not states or any(isinstance(facts[item.partition("=")[0]], dict) for item in states):
        states = [f"not known in call {call}"]
    return file_digest("&".join(states).encode())


def late(documents: Documents, run: dict[str, Any], facts: dict[str, Any]) -> None:
    """Take over what a call that outlasted the hashing says of its weights itself: the files' root, or a reason."""
    files = facts.pop("weights.files_root", {}).get("$field", {}).get("value")
    if isinstance(files, str):
        run["weight_files"] = documents.weights(raw(files))
    reason = facts.pop("weights.loaded_root", {}).get("$field", {}).get("reason")
    if reason and run.get("weights") is None:
        run["weights_note"] = clean(f"unknown: {reason}")


def bind(groups: Groups, stream: int, binding: dict[str, Any]) -> None:
    """Bind the calls of one load to the weights they ran on, or to the reason why those are not known."""
    bulk, documents = groups.bulk, groups.documents
    where = "stream=? and load=? and start_seq between ? and ?"
    calls = (stream, binding["load"], binding["from"], binding["to"])
    if binding.get("reason"):
        note = f"unknown: {binding['reason']}"
        bulk.run(f"update runs set weights_note=? where {where} and weights is null", (note, *calls))
        return
    number = documents.weights(raw(binding["root"]))
    if binding["kind"] == "files":
        bulk.run(f"update runs set weight_files=? where {where}", (number, *calls))
        return
    late = bulk.run(f"select {','.join(LATE)} from runs where {where} and weights is null", calls)
    bulk.run(f"update runs set weights=?, weights_note=null where {where} and weights is null", (number, *calls))
    for found in late:
        run = {**dict(zip(LATE, found, strict=True)), "weights": number}
        query = f"select {','.join(COUNTED)} from sequences where run=?"
        for row in bulk.run(query, (run["id"],)):
            groups.count(run, dict(zip(COUNTED, row, strict=True)))
