"""The history of equal inputs: for each input that was run more than once, its runs with their fields and outputs.

Read in one pass, input by input, through the index on it: what is in memory is one input's runs, and each distinct
fingerprint once. Of an input with very many runs, evenly spaced ones are kept. Whether a run was sampled is part of
what is equal, with its random state: two draws differ, and that says nothing of any field.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import orjson
from sqlalchemy import Connection, Engine, Row, Select, func, or_, select

from provenance.catalogue.fields import spec
from provenance.errors import BadSetting
from provenance.facts import Field, Fingerprint, Run, State
from provenance.store import queries, tables
from provenance.store.queries import MODEL_NAMES
from provenance.store.rows import clean

MOST = 10_000  # of one input, at least this many runs are kept, and at most twice as many
CHUNK = 2000
LEAST = 6  # digits of a key
KNOWN_STATE = re.compile(r'"rng\.[a-z_0-9]+_sha256":"')
UNKNOWN_STATE = re.compile(r'"rng\.[a-z_0-9]+_sha256":\{"\$field":\{"state":"(unknown|redacted)"')
Document = dict[str, object]


class Seen(NamedTuple):
    """One run of one input. What is not known is left out; a state without a value is a tuple of its word."""

    output: bytes
    at: tuple[int, ...]
    shared: tuple[Document, ...]  # environment, switches, model, settings, weights, files: one object a document
    own: Document


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which runs. ``without`` names runs that are left out, as when they are what is explained."""

    inputs: Sequence[bytes] | None = None  # None is every input
    models: Sequence[str] = ()
    since: int = 0  # nanoseconds since 1970
    limit: int = 0  # the newest sequences
    without: Sequence[str] = ()


def groups(engine: Engine, chosen: Chosen) -> Iterator[list[Seen]]:
    """Return the runs of each input that was run more than once, input by input."""
    with engine.connect() as connection:
        query = _query(connection, chosen)
        reading = _Reading(connection)
        found = connection.execution_options(stream_results=True, yield_per=CHUNK).execute(query)
        key: object = None
        rows: list[Row[Any]] = []
        stride, number = 1, 0
        for row in found:
            now = row.input_key, row.return_index, _draw(row)
            if now != key:
                if len(rows) > 1:
                    yield [reading.seen(item) for item in rows]
                key, rows, stride, number = now, [], 1, 0
            if number % stride == 0:
                rows.append(row)
                if len(rows) > 2 * MOST:
                    rows, stride = rows[::2], 2 * stride
            number += 1
        if len(rows) > 1:
            yield [reading.seen(item) for item in rows]


def inputs_of(engine: Engine, run_id: str) -> list[bytes]:
    """Return the keys of a run's inputs."""
    runs, sequences = tables.runs, tables.sequences
    query = (
        select(sequences.c.input_key)
        .select_from(sequences.join(runs, runs.c.id == sequences.c.run))
        .where(runs.c.run_id == run_id, sequences.c.input_key.is_not(None))
        .distinct()
    )
    with engine.connect() as connection:
        return [bytes(key) for (key,) in connection.execute(query)]


def around(a: Run, b: Run) -> Chosen:
    """Return the history that bears on two runs: their inputs and their models, and not the two themselves."""
    inputs = {bytes.fromhex(item.input_key) for run in (a, b) for item in run.sequences if item.input_key}
    names = {
        str(run.fields[name].value)
        for run in (a, b) for name in MODEL_NAMES if name in run.fields and run.fields[name].state is State.VALUE
    }  # fmt: skip
    return Chosen(sorted(inputs), sorted(names), without=(a.run_id, b.run_id))


def input_key(engine: Engine, text: str) -> bytes:
    """Find the input whose key begins so, in hexadecimal, as ``show --json`` prints it. Raises BadSetting."""
    digits = text.lower()
    if not LEAST <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
        raise BadSetting(
            f"an input's key is {LEAST} to 64 hexadecimal digits, and {text!r} is not. `provenance show --json` "
            "prints it as input_key."
        )
    column = tables.sequences.c.input_key
    low, high = bytes.fromhex(digits.ljust(64, "0")), bytes.fromhex(digits.ljust(64, "f"))
    with engine.connect() as connection:
        query = select(column).where(column >= low, column <= high).distinct().order_by(column).limit(2)
        found = [bytes(key) for (key,) in connection.execute(query)]
    if len(found) > 1:
        raise BadSetting(f"more than one input's key begins with {text}: give more of its digits.")
    if not found:
        raise BadSetting(f"no input's key begins with {text}. `provenance show --json` prints it as input_key.")
    return found[0]


# -- the query ----------------------------------------------------------------------------------------


def _query(connection: Connection, chosen: Chosen) -> Select[Any]:
    runs, rows = tables.runs, tables.sequences
    newest = _since(connection, chosen)
    again = select(rows.c.input_key).where(rows.c.output_key.is_not(None), rows.c.started_at >= newest)
    again = again.group_by(rows.c.input_key).having(func.count() > 1)
    query = (
        select(
            rows.c.input_key, rows.c.output_key, rows.c.started_at, rows.c.run, rows.c.prompt_index,
            rows.c.return_index, rows.c.padding_tokens, runs.c.environment, runs.c.switches, runs.c.model,
            runs.c.settings, runs.c.weights, runs.c.weight_files, runs.c.random_state, runs.c.call_facts,
        )
        .select_from(rows.join(runs, (runs.c.id == rows.c.run) & (runs.c.started_at == rows.c.started_at)))
        .where(
            rows.c.output_key.is_not(None), rows.c.started_at >= newest, runs.c.status == "ok", runs.c.kind != "cached",
        )
        .order_by(
            rows.c.input_key, rows.c.return_index, runs.c.random_state, rows.c.started_at, rows.c.run,
            rows.c.prompt_index,
        )
    )  # fmt: skip
    if chosen.inputs is not None:
        query = query.where(rows.c.input_key.in_(chosen.inputs))
    else:
        query = query.where(rows.c.input_key.in_(again))
    if chosen.models:
        fields, names = tables.fingerprint_fields, [clean(name) for name in chosen.models]
        # A name is whole, or what follows the last slash of a repository's or a folder's.
        ends = (fields.c.value.endswith(f"/{name}", autoescape=True) for name in names)
        called = select(fields.c.fingerprint).where(
            fields.c.name.in_(MODEL_NAMES), or_(fields.c.value.in_(names), *ends)
        )
        query = query.where(runs.c.model.in_(called))
    if chosen.without:
        query = query.where(runs.c.run_id.not_in(chosen.without))
    return query


def _since(connection: Connection, chosen: Chosen) -> int:
    """Return from when on runs are read: what was asked for, or the start of the newest so many sequences."""
    if not chosen.limit:
        return chosen.since
    column = tables.sequences.c.started_at
    query = select(column).where(column >= chosen.since)
    if chosen.inputs is not None:
        query = query.where(tables.sequences.c.input_key.in_(chosen.inputs))
    oldest = connection.execute(query.order_by(column.desc()).offset(chosen.limit - 1).limit(1)).scalar()
    return chosen.since if oldest is None else int(oldest)


def _draw(row: Any) -> object:
    """Return what a sampled run drew from; a draw whose state is not known is equal to no other."""
    if row.random_state is None:
        return None
    facts = row.call_facts
    known = KNOWN_STATE.search(facts) is not None and UNKNOWN_STATE.search(facts) is None
    return row.random_state if known else (row.run, row.prompt_index)


# -- documents ----------------------------------------------------------------------------------------


class _Reading:
    """Turns rows into what was seen, and reads each distinct document once."""

    def __init__(self, connection: Connection) -> None:
        # A connection of its own: the streaming one is in the middle of its rows.
        self._engine = connection.engine
        self._documents: dict[tuple[int, bool], Document] = {}
        self._roots: dict[tuple[str, int], Document] = {}
        self._nothing: Document = {}

    def seen(self, row: Any) -> Seen:
        facts = orjson.loads(row.call_facts)
        idle = facts.get("sampled") is False
        prints = (self._document(row[scope], idle) for scope in (7, 8, 9, 10))
        weights = (self._root("weights.loaded_root", row.weights), self._root("weights.files_root", row.weight_files))
        own: Document = {"batch.position": row.prompt_index}
        if row.padding_tokens is not None:
            own["batch.padding_tokens"] = row.padding_tokens
        for name, value in facts.items():
            if acts(name, idle):
                if not isinstance(value, dict) or "$field" not in value:
                    own[name] = value
                else:
                    _put(own, Field.read(name, value["$field"]))
        at = (row.started_at, row.run, row.prompt_index)
        return Seen(bytes(row.output_key), at, (*prints, *weights), own)

    def _document(self, number: int | None, idle: bool) -> Document:
        if number is None:
            return self._nothing
        if (number, idle) not in self._documents:
            query = select(tables.fingerprints.c.document).where(tables.fingerprints.c.id == number)
            with self._engine.connect() as connection:
                stored = connection.execute(query).scalar_one()
            made: Document = {}
            for item in Fingerprint.read(bytes(stored)).fields.values() if stored else ():
                if acts(item.name, idle):
                    _put(made, item)
            self._documents[number, idle] = made
        return self._documents[number, idle]

    def _root(self, name: str, number: int | None) -> Document:
        if number is None:
            return self._nothing
        if (name, number) not in self._roots:
            query = select(tables.weights.c.root).where(tables.weights.c.id == number)
            with self._engine.connect() as connection:
                self._roots[name, number] = {name: connection.execute(query).scalar_one()}
        return self._roots[name, number]


def _put(document: Document, item: Field) -> None:
    if item.state is State.VALUE:
        document[item.name] = item.value
    elif item.known:
        document[item.name] = (item.state.value,)


@lru_cache(maxsize=4096)
def acts(name: str, idle: bool) -> bool:
    """Say whether a name is a field that can act; where nothing is sampled, one that acts in sampling alone cannot.

    >>> acts("torch.num_threads", True), acts("text", True), acts("seed.given", True), acts("seed.given", False)
    (True, False, False, True)
    """
    if not queries.FACT_FIELDS.match(name):
        return False
    found = spec(name)
    if found.effect == "none" or found.active_when == "never":
        return False
    return not (idle and all("sample" in side.split("&") for side in found.active_when.split("|")))
