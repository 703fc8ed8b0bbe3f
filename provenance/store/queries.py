"""Questions to the store: find a run by what a person types, list runs, and read one back whole. Read only."""

import re
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, Engine, func, or_, select

from provenance.errors import BadFile, RunNotFound
from provenance.facts import DIGEST, ROLES, Field, Fingerprint, Run, Sequence
from provenance.store import blobs, codec, tables
from provenance.store.reading import Body, sequence
from provenance.store.rows import clean

FACT_FIELDS = re.compile(r"^[a-z][a-z_]*\.[A-Za-z0-9_.]+$")
SCOPES = ("environment", "switches", "model", "settings")
BESIDE = ("prompt.embeds", "prompt.media")
MODEL_NAMES = ("model.name_or_path", "model.class")


@dataclass(frozen=True, slots=True)
class Line:
    """One run in a list."""

    run_id: str
    started_at: int
    status: str
    runtime: str
    operation: str
    name: str
    model: str
    batch_size: int
    duration_ns: int | None
    text_in: str
    text_out: str
    error: str


def find(engine: Engine, reference: str) -> str:
    """Return the run id that a reference means: a unique prefix, ``last``, ``last~N`` or ``tag:NAME``.

    Raises RunNotFound.
    """
    runs = tables.runs
    newest = runs.c.started_at.desc(), runs.c.id.desc()
    with engine.connect() as connection:
        match = re.fullmatch(r"last(?:~([0-9]{1,9}))?", reference)
        if match:
            query = select(runs.c.run_id).order_by(*newest).offset(int(match.group(1) or 0)).limit(1)
            newest_id = connection.execute(query).scalar()
            if newest_id is None:
                raise RunNotFound(reference, [])
            return str(newest_id)
        if reference.startswith("tag:"):
            return _tagged(connection, reference)
        if not re.fullmatch(r"[0-9a-fA-F-]{4,36}", reference):
            raise RunNotFound(reference, [])
        prefix = reference.lower()
        begins = _begins(runs.c.run_id, prefix, engine)
        query = select(runs.c.run_id).where(begins).order_by(runs.c.run_id).limit(4)
        found = [str(row[0]) for row in connection.execute(query)]
    if len(found) != 1:
        raise RunNotFound(reference, found)
    return found[0]


def _begins(column: Any, prefix: str, engine: Engine) -> Any:
    """Ask for what begins with hexadecimal digits and hyphens, in the form for which the database has its index."""
    if engine.dialect.name == "postgresql":  # whose order of text may be that of a language: no prefix is a range
        return column.like(prefix + "%")
    return (column >= prefix) & (column < prefix + "g")


def _tagged(connection: Connection, reference: str) -> str:
    """Find the newest run with a name or a tag: ``tag:nightly``, ``tag:suite=7``."""
    runs = tables.runs
    query = select(runs.c.run_id).where(_bears(reference[4:])).order_by(runs.c.started_at.desc()).limit(1)
    found = connection.execute(query).scalar()
    if found is None:
        raise RunNotFound(reference, [])
    return str(found)


def _bears(tag: str) -> Any:
    """Return the condition that a run has a name or a tag."""
    runs, tags = tables.runs, tables.run_tags
    key, equals, value = clean(tag).partition("=")
    has = select(tags.c.run).where(tags.c.key == key)
    if equals:
        return runs.c.id.in_(has.where(tags.c.value == value))
    return or_(runs.c.name == key, runs.c.id.in_(has))


def log(engine: Engine, limit: int, name: str = "", status: str = "", tag: str = "") -> list[Line]:
    """List the newest runs, newest first."""
    runs, sequences, fields, tags = tables.runs, tables.sequences, tables.fingerprint_fields, tables.run_tags
    first = (
        (sequences.c.run == runs.c.id)
        & (sequences.c.started_at == runs.c.started_at)
        & (sequences.c.prompt_index == 0)
        & (sequences.c.return_index == 0)
    )
    model = (
        select(fields.c.value)
        .where(fields.c.fingerprint == runs.c.model, fields.c.name.in_(MODEL_NAMES))
        .order_by(fields.c.name.desc(), fields.c.value.is_(None))
    )
    query = (
        select(
            runs.c.run_id, runs.c.started_at, runs.c.status, runs.c.runtime, runs.c.operation,
            func.coalesce(runs.c.name, ""), func.coalesce(model.limit(1).scalar_subquery(), ""), runs.c.batch_size,
            runs.c.duration_ns, func.coalesce(sequences.c.input_preview, ""),
            func.coalesce(sequences.c.output_preview, ""), func.coalesce(runs.c.error, ""),
        )
        .select_from(runs.outerjoin(sequences, first))
        .order_by(runs.c.started_at.desc(), runs.c.id.desc())
        .limit(limit)
    )  # fmt: skip
    if name:
        query = query.where(runs.c.name == clean(name))
    if status:
        query = query.where(runs.c.status == clean(status))
    if tag:
        key, equals, value = clean(tag).partition("=")
        has = select(tags.c.run).where(tags.c.key == key)
        query = query.where(runs.c.id.in_(has.where(tags.c.value == value) if equals else has))
    with engine.connect() as connection:
        return [Line(*tuple(row)) for row in connection.execute(query)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One output of a group of equal inputs: how often it came, and the newest sequence that holds it."""

    reference: str  # empty where the newest sequence was erased
    runs: int
    text: str


@dataclass(frozen=True, slots=True)
class Incident:
    """Equal inputs and the outputs that they gave, the most frequent first."""

    text_in: str
    runs: int
    first_at: int
    last_at: int
    outputs: tuple[Answer, ...]

    @property
    def commands(self) -> list[str]:
        """Return the commands that compare the most frequent output with each other one."""
        kept = [output.reference for output in self.outputs if output.reference]
        return [f"provenance diff {kept[0]} {other}" for other in kept[1:]]


def incidents(engine: Engine, limit: int, diverged: bool) -> list[Incident]:
    """List groups of equal input that were asked more than once, newest first; ``diverged``: with several outputs."""
    groups, answers = tables.equal_inputs, tables.equal_outputs
    query = select(groups).order_by(groups.c.last_at.desc(), groups.c.grp).limit(limit)
    query = query.where(groups.c.outputs > 1) if diverged else query.where(groups.c.runs > 1)
    found = []
    with engine.connect() as connection:
        for group in connection.execute(query):
            rows = connection.execute(
                select(answers)
                .where(answers.c.grp == group.grp)
                .order_by(answers.c.runs.desc(), answers.c.last_run.desc())
            )
            told = [_answer(connection, group.input_key, row) for row in rows]
            outputs = tuple(answer for answer, _ in told)
            prompt = next((text for _, text in told if text), "")
            found.append(Incident(prompt, group.runs, group.first_at, group.last_at, outputs))
    return found


def _answer(connection: Connection, input_key: bytes, output: Any) -> tuple[Answer, str]:
    """Return an output of a group with its newest sequence, and the text of the prompt."""
    runs, rows = tables.runs, tables.sequences
    query = (
        select(runs.c.run_id, runs.c.batch_size, rows.c.prompt_index, rows.c.return_index, rows.c.input_preview,
               rows.c.output_preview)
        .select_from(rows.join(runs, (runs.c.id == rows.c.run) & (runs.c.started_at == rows.c.started_at)))
        .where(rows.c.run == output.last_run, rows.c.input_key == input_key, rows.c.output_key == output.output_key)
        .order_by(rows.c.prompt_index, rows.c.return_index)
        .limit(1)
    )  # fmt: skip
    row = connection.execute(query).first()
    if row is None:  # erased since
        return Answer("", output.runs, ""), ""
    last = select(func.max(rows.c.return_index)).where(
        rows.c.run == output.last_run, rows.c.prompt_index == row.prompt_index
    )
    several = connection.execute(last).scalar()
    place = f":{row.prompt_index}" + (f".{row.return_index}" if several else "")
    reference = row.run_id + (place if row.batch_size > 1 or several else "")
    return Answer(reference, output.runs, row.output_preview or ""), row.input_preview or ""


def calls(engine: Engine, limit: int, tag: str = "") -> list[str]:
    """Return the newest calls that succeeded, oldest first; with ``tag`` those that bear it. Replays are none."""
    runs = tables.runs
    query = select(runs.c.run_id).where(runs.c.kind == "call", runs.c.status == "ok")
    if tag:
        query = query.where(_bears(tag))
    query = query.order_by(runs.c.started_at.desc(), runs.c.id.desc()).limit(limit)
    with engine.connect() as connection:
        return [str(found) for found in connection.execute(query).scalars()][::-1]


def baseline(engine: Engine, tag: str, run_id: str, input_keys: Many[str], key_id: str) -> str | None:
    """Return the newest other run with a tag or name that was asked one of some inputs, under the same key."""
    runs, rows, streams = tables.runs, tables.sequences, tables.streams
    try:
        keys = [bytes.fromhex(key) for key in input_keys]
    except ValueError:  # a file of another making
        return None
    query = (
        select(runs.c.run_id)
        .select_from(rows.join(runs, (runs.c.id == rows.c.run) & (runs.c.started_at == rows.c.started_at))
                     .join(streams, streams.c.id == runs.c.stream))
        .where(rows.c.input_key.in_(keys), streams.c.key_id == key_id, runs.c.run_id != run_id, _bears(tag))
        .order_by(runs.c.started_at.desc(), runs.c.id.desc())
        .limit(1)
    )  # fmt: skip
    with engine.connect() as connection:
        found = connection.execute(query).scalar()
    return None if found is None else str(found)


def load(engine: Engine, run_id: str) -> Run:
    """Read a whole run back: fields, sequences, payloads and token evidence."""
    runs, streams = tables.runs, tables.streams
    with engine.connect() as connection:
        row = connection.execute(select(runs).where(runs.c.run_id == run_id)).mappings().first()
        if row is None:
            raise RunNotFound(run_id, [])
        stream = connection.execute(select(streams).where(streams.c.id == row["stream"])).mappings().one()
        facts = orjson.loads(row["call_facts"])
        fields, digests = _fields(connection, row, facts, stream)
        tag_rows = connection.execute(select(tables.run_tags).where(tables.run_tags.c.run == row["id"]))
        tags = {item.key: item.value for item in tag_rows}
        bodies = _bodies(connection, row["id"])
        rows = _sequence_rows(connection, row["id"])
    error = next((body.data.decode("utf-8", "replace") for body in bodies if ROLES[body.role] == "error.text"), "")
    return Run(
        run_id=row["run_id"], kind=row["kind"], runtime=row["runtime"], operation=row["operation"],
        status=row["status"],
        started_at=row["started_at"], duration_ns=row["duration_ns"], fields=fields,
        sequences=tuple(_sequence(item, bodies, facts) for item in rows),
        name=row["name"] or "", tags=tags, error=": ".join(filter(None, (row["error"], error))),
        key_id=stream["key_id"], digests=digests,
        states={ROLES[b.role]: b.data for b in bodies if ROLES[b.role].startswith("rng.")},
    )  # fmt: skip


def _fields(
    connection: Connection, row: Any, facts: dict[str, Any], stream: Any
) -> tuple[dict[str, Field], dict[str, str]]:
    """Gather the fields of a run from its fingerprints, its weights and its own facts."""
    fields: dict[str, Field] = {}
    digests: dict[str, str] = {}
    prints = tables.fingerprints
    for scope in SCOPES:
        if row[scope] is None:
            continue
        found = connection.execute(select(prints).where(prints.c.id == row[scope])).one()
        digests[scope] = found.digest
        if found.document:
            fields.update(Fingerprint.read(found.document).fields)
    fields.update(_weights(connection, row, digests))
    for name, value in facts.items():
        if FACT_FIELDS.match(name):
            fields[name] = _fact(name, value)
    fields["context.host"] = Field("context.host", stream["host"])
    fields["context.pid"] = Field("context.pid", stream["pid"])
    return fields, digests


def _fact(name: str, value: Any) -> Field:
    if isinstance(value, dict) and "$field" in value:
        return Field.read(name, value["$field"])
    return Field(name, value)


def _weights(connection: Connection, row: Any, digests: dict[str, str]) -> dict[str, Field]:
    """Return the roots of the weights as fields: what is bound, or why nothing is."""
    if row["model"] is None:
        return {}
    roots = tables.weights
    found: dict[str, Field] = {}
    for name, column in (("weights.loaded_root", "weights"), ("weights.files_root", "weight_files")):
        if row[column] is not None:
            root = connection.execute(select(roots.c.root).where(roots.c.id == row[column])).scalar_one()
            found[name] = Field(name, root, source="hashed")
            digests[column] = root
        elif column == "weights":
            note = (row["weights_note"] or "not hashed yet").removeprefix("unknown: ")
            found[name] = Field.unknown(name, note)
    return found


def manifests(engine: Engine, root: str) -> list[bytes]:
    """Return the documents of the weights whose root begins so: two at most."""
    roots = tables.weights
    query = select(roots.c.document).where(roots.c.root >= clean(root), roots.c.root < clean(root) + "g").limit(2)
    with engine.connect() as connection:
        return [bytes(document) for document in connection.execute(query).scalars()]


def _bodies(connection: Connection, run: int) -> list[Body]:
    refs, payloads = tables.payload_refs, tables.payloads
    query = (
        select(refs.c.role, refs.c.prompt_index, refs.c.return_index, refs.c.part, refs.c.encoding, refs.c.size,
               payloads.c.codec, payloads.c.data)
        .select_from(refs.join(payloads, payloads.c.id == refs.c.body))
        .where(refs.c.run == run)
        .order_by(refs.c.role, refs.c.prompt_index, refs.c.return_index, refs.c.part)
    )  # fmt: skip
    bodies = {}
    for item in connection.execute(query):
        try:
            if item.codec == codec.BLOB:
                data = blobs.read(connection, bytes(item.data), item.size)
            else:
                data = codec.unpack(item.codec, item.data, item.size)
        except ValueError as error:
            raise BadFile(f"a stored payload is damaged: {error}.") from None
        body = Body(item.role, item.prompt_index, item.return_index, item.part, item.encoding, data)
        bodies[body[:4]] = body  # a body may stand in two months: one is enough
    return list(bodies.values())


def _sequence_rows(connection: Connection, run: int) -> Many[Any]:
    rows = tables.sequences
    query = select(rows).where(rows.c.run == run).order_by(rows.c.prompt_index, rows.c.return_index)
    return list(connection.execute(query).mappings())


def _sequence(row: Any, bodies: list[Body], facts: dict[str, Any]) -> Sequence:
    mine = {
        ROLES[body.role]: body
        for body in bodies
        if body.row == row["prompt_index"] and (body.ret == row["return_index"] or body.role < 16)
    }
    around = [body for body in bodies if body.row == row["prompt_index"]]
    told = (body for body in around if ROLES[body.role] in BESIDE and body.encoding == DIGEST)
    media = tuple(body.data.decode("utf-8", "replace") for body in told)
    aside = {(ROLES[body.role], body.part): body.data for body in around if ROLES[body.role].endswith(".media")}
    return sequence(row, mine, facts, media, aside)


def run_count(engine: Engine) -> int:
    """Count the runs in the store."""
    with engine.connect() as connection:
        return int(connection.execute(select(func.count()).select_from(tables.runs)).scalar_one())
