"""One transaction's worth of records of one stream, turned into rows and leaves."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

import orjson

from provenance.facts import BLOB, KIND, ROLE, SEALED, STATUSES, End, Noted, Payload, Record, Start, Stream
from provenance.integrity import digests
from provenance.integrity.secrets import ARGUMENTS, TAKEN, UNKEPT
from provenance.store import early, leaves, rolling, tables
from provenance.store.bodies import Bodies
from provenance.store.rows import EMPTY_RUN, EMPTY_SEQUENCE, Bulk, Documents, Rows, clean, write

LOG = 1
PREVIEW = 120
DAY = 86_400_000_000_000
# How it is said that a result cannot be told to equal another.
LOST = (TAKEN.format("result"), UNKEPT.partition("{}")[0] + "result")
INPUT_ROLES = {ROLE[name] for name in ("prompt.ids", "prompt.embeds", "prompt.media", "prompt.mask", "arguments")}
OUTPUT_ROLES = {ROLE[name] for name in ("output.ids", "output.value", "output.media")}
IN_TEXT, OUT_TEXT = (ROLE["prompt.text"], ROLE["arguments"]), (ROLE["output.text"], ROLE["output.value"])


class Item(NamedTuple):
    """One frame on its way in: the record, the digest of its bytes and where it ends in its segment."""

    record: Record
    digest: bytes
    end: int


class Batch:
    """One transaction's worth of records of one stream."""

    def __init__(self, bulk: Bulk, key: bytes, key_id: str, stream: Stream) -> None:
        self.bulk, self.key, self.key_id, self.stream = bulk, key, key_id, stream
        self.rows = Rows()
        self.documents = Documents(bulk)
        self.bodies = Bodies(bulk, self.rows)
        self.known: dict[int, bytes] = {}
        self.facts: dict[int, dict[str, Any]] = {}  # of the starts in this batch, as read
        self.early: dict[int, early.Held] = {}  # ends that came before their starts, by those
        self.id = 0
        self.next_run = self.next_entry = 0
        self.about: dict[str, Any] = orjson.loads(stream.about or b"{}")
        self.groups = rolling.Groups(bulk, self.documents, str(self.about.get("host", "")))

    # -- the frame of the transaction --------------------------------------------------------------

    def begin(self, items: Sequence[Item]) -> bool:
        """Lock the stream's row, making it at first sight, and see which records are there already."""
        self.bulk.alone()
        self._lock_stream()
        self.next_run = self._next("runs", "id")
        self.next_entry = self.bulk.run("select coalesce(max(idx) + 1, 0) from log_entries where log=?", (LOG,))[0][0]
        if items:
            seqs = [item.record.seq for item in items]
            found = self.bulk.run(
                "select seq, frame_digest from ingested where stream=? and seq between ? and ?",
                (self.id, min(seqs), max(seqs)),
            )
            self.known = {seq: bytes(digest) for seq, digest in found}
            self.early = early.among(self.bulk, self.id, min(seqs), max(seqs))
        return bool(items)

    def _next(self, table: str, column: str) -> int:
        return int(self.bulk.run(f"select coalesce(max({column}), 0) + 1 from {table}")[0][0])

    def _lock_stream(self) -> None:
        stream = self.stream
        found = self.bulk.run("select id from streams where stream_id=?", (stream.stream_id,))
        if found:
            self.id = found[0][0]
            return
        self.id = self._next("streams", "id")
        about = self.about
        self.bulk.insert(
            tables.streams,
            [(
                self.id, stream.stream_id, str(about.get("host", "")), stream.pid, stream.boot_id, stream.wall_ns,
                clean(str(about.get("program", ""))), clean(stream.about.decode("utf-8", "replace")), self.key_id,
                0, 0, -1, stream.wall_ns, 0,
            )],
        )  # fmt: skip

    def is_new(self, item: Item) -> bool:
        """Say whether a record is not in the store yet; one with other bytes under its number raises an alarm."""
        there = self.known.get(item.record.seq)
        if there is None:
            self.known[item.record.seq] = item.digest
            return True
        if there != item.digest:
            self.event(
                "alarm", item.record.seq, {"why": "another record with this number", "digest": item.digest.hex()}
            )
        return False

    def finish(self, segment: int, items: Sequence[Item], ended: bool) -> None:
        """Write the rows, move the position, and close the books of a stream that is over."""
        self._write()
        self.groups.write()
        if items:
            last = items[-1]
            self.bulk.run(
                "update streams set segment=?, position=?, last_seq=?, last_seen=? where id=? "
                "and (segment < ? or segment = ? and position < ?)",  # a segment that comes late moves nothing back
                (segment, last.end, last.record.seq, _seen(last.record, self.stream.wall_ns), self.id, segment, segment,
                 last.end),
            )  # fmt: skip
        if ended:
            self.bulk.run("update streams set ended=1 where id=?", (self.id,))
            self.bulk.run("update runs set status='crashed' where stream=? and status='running'", (self.id,))
            self.bulk.run(
                "update runs set weights_note='unknown: process ended' "
                "where stream=? and weights is null and weights_note is null and load > 0",
                (self.id,),
            )

    def _write(self) -> None:
        self.bodies.settle()
        write(self.bulk, self.rows)

    def damage(self, segment: int, hole: Any) -> None:
        """Note damaged bytes, once: a scan that was cut short is begun again."""
        detail = {"segment": segment, "from_byte": hole.start, "to_byte": hole.end}
        same = (self.id, orjson.dumps(detail).decode())
        if not self.bulk.run("select 1 from events where stream=? and kind='damage' and detail=?", same):
            self.event("damage", hole.after_seq, detail)

    def event(self, kind: str, seq: int, detail: dict[str, Any]) -> None:
        """Note something that happened to the stream itself."""
        at = self.stream.wall_ns
        text = clean(orjson.dumps(detail).decode())
        self.bulk.insert(tables.events, [(self._next("events", "id"), self.id, seq, kind, at, text)])

    # -- records ----------------------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """Turn one record into rows."""
        record = item.record
        if isinstance(record, Start):
            leaf = self._start(record)
        elif isinstance(record, End):
            leaf = self._end(record)
        else:
            leaf = self._note(record)
        kind = 1 if isinstance(record, Start) else 2 if isinstance(record, End) else 3
        self.rows.entries.append((LOG, self.next_entry, self.id, record.seq, kind, leaf))
        self.rows.ingested.append((self.id, record.seq, item.digest, LOG, self.next_entry))
        self.next_entry += 1

    def again(self, item: Item) -> None:
        """Take up a record that is in already: runs that came late may be among the calls that it binds to weights."""
        same = self.known[item.record.seq] == item.digest
        if same and isinstance(item.record, Noted) and item.record.kind == "binding":
            self._write()
            rolling.bind(self.groups, self.id, orjson.loads(item.record.document))

    def _start(self, record: Start) -> bytes:
        request = record.request
        facts = orjson.loads(request.facts)
        run = EMPTY_RUN | {
            "id": self.next_run, "started_at": request.wall_ns, "run_id": _uuid(request.run_id),
            "stream": self.id, "start_seq": record.seq, "kind": clean(facts.pop("kind", "call"))[:8],
            "runtime": clean(facts.pop("runtime", ""))[:32], "operation": clean(facts.pop("operation", "")),
            "status": "running",
            "environment": self.documents.fingerprint(request.environment),
            "switches": self.documents.fingerprint(request.switches),
            "model": self.documents.fingerprint(request.model), "load": request.load, "batch_size": request.rows,
            "seed": _seed(facts.get("seed.torch_initial")), "name": clean(facts.pop("name", "")) or None,
            "parent_run": None if request.parent == bytes(16) else _uuid(request.parent),
        }  # fmt: skip
        self.next_run += 1
        for key, value in facts.pop("tags", {}).items():
            self.rows.tags.append((run["id"], clean(key)[:200], clean(value)))
        run["call_facts"] = clean(orjson.dumps(facts).decode())
        self.facts[record.seq] = facts
        salts = [leaves.salt(item, record.seed) for item in request.payloads]
        commitments = self._payloads(run, request.payloads, salts)
        leaf = leaves.of_start(self.stream.stream_id, record, commitments)
        run["leaf"] = digests.leaf_hash(leaf)
        self.rows.runs[record.seq] = run
        inputs = self.rows.inputs[run["id"]] = {}
        for row in range(request.rows):
            mine = request.payloads if request.rows == 1 else [item for item in request.payloads if item.row == row]
            # What lost a secret is equal to nothing: two calls that differed in it alone look alike.
            key = self._key(mine, INPUT_ROLES, "input") if ARGUMENTS not in facts else None
            first = inputs[row, 0] = (key, _preview(mine, IN_TEXT))
            self.rows.sequences[run["id"], row, 0] = EMPTY_SEQUENCE | {
                "run": run["id"], "started_at": run["started_at"], "prompt_index": row, "return_index": 0,
                "input_key": first[0], "input_preview": first[1],
            }  # fmt: skip
        if record.seq in self.early:
            self._settle(run, self.early.pop(record.seq))
        return leaf

    def _settle(self, run: dict[str, Any], held: early.Held) -> None:
        """Complete a call whose end was here first. The log keeps the leaf that the end was given."""
        self._ended(run, held.record, held.salts, bytes(32))
        early.release(self.bulk, self.id, run["start_seq"])
        self.event("settled", held.record.seq, {"why": "the start of that call came later", "start": run["start_seq"]})

    def _end(self, record: End) -> bytes:
        output = record.output
        salts = [leaves.salt(item, record.seed) for item in output.payloads]
        run = self._opened(output.start_seq)
        if run is not None:
            return self._ended(run, record, salts, bytes(run["leaf"]))
        self.event("alarm", record.seq, {"why": "the end of a call that never began", "start": output.start_seq})
        early.hold(self.bulk, self.id, record, salts)
        commitments = [leaves.committed(item, salt) for item, salt in zip(output.payloads, salts, strict=True)]
        return leaves.of_end(self.stream.stream_id, record, bytes(32), commitments)

    def _ended(self, run: dict[str, Any], record: End, salts: list[bytes], start_leaf: bytes) -> bytes:
        """Complete a run by its end, and return the end's leaf."""
        output = record.output
        facts = orjson.loads(output.facts)
        commitments = self._payloads(run, output.payloads, salts)
        leaf = leaves.of_end(self.stream.stream_id, record, start_leaf, commitments)
        run |= {
            "end_seq": record.seq, "status": STATUSES[output.status], "ended_at": output.wall_ns,
            "duration_ns": output.duration_ns, "settings": self.documents.fingerprint(output.settings),
            # A binding may have come first: what is bound stays bound.
            "weights": self.documents.weights(output.weights) or run.get("weights"),
            "error": clean(facts.pop("error", "")) or None,
            "random_state": rolling.drawn_from(facts, (self.id, output.start_seq)),
            "leaf": digests.leaf_hash(leaf),
        }  # fmt: skip
        rolling.late(self.documents, run, facts)
        before = self.facts.get(output.start_seq)
        before = orjson.loads(run["call_facts"]) if before is None else before
        run["call_facts"] = clean(orjson.dumps({**before, **facts}).decode())
        self._sequences(run, record, str(facts.get("output", "")).startswith(LOST))
        return leaf

    def _opened(self, start_seq: int) -> dict[str, Any] | None:
        """Return the run that a start opened: in this batch, or committed before."""
        if start_seq in self.rows.runs:
            return self.rows.runs[start_seq]
        if start_seq not in self.rows.old_runs:
            names = ("id", "started_at", "leaf", "call_facts", "kind", "environment", "model", "load", "status",
                     "weights", "weight_files", "weights_note", "runtime", "operation")  # fmt: skip
            found = self.bulk.run(
                f"select {','.join(names)} from runs where stream=? and start_seq=?", (self.id, start_seq)
            )
            if not found:
                return None
            self.rows.old_runs[start_seq] = dict(zip(names, found[0], strict=True))
        return self.rows.old_runs[start_seq]

    def _sequences(self, run: dict[str, Any], record: End, lost: bool) -> None:
        inputs, payloads = self._input_keys(run), record.output.payloads
        for item in record.output.sequences:
            mine = [p for p in payloads if p.row == item.row and p.ret == item.ret]
            margin = None if item.margin != item.margin else item.margin  # NaN
            place = (run["id"], item.row, item.ret)
            old = (item.row, item.ret) in inputs and place not in self.rows.sequences
            table = self.rows.old_sequences if old else self.rows.sequences
            first = inputs.get((item.row, 0), (None, None))
            row = table.get(place)
            if row is None:
                row = table[place] = EMPTY_SEQUENCE | {
                    "run": run["id"], "started_at": run["started_at"], "prompt_index": item.row,
                    "return_index": item.ret, "input_key": first[0], "input_preview": first[1],
                }  # fmt: skip
            row |= {
                "output_key": None if lost else self._key(mine, OUTPUT_ROLES, "output"), "input_tokens": item.n_input,
                "output_tokens": item.n_output, "padding_tokens": item.padding,
                "finish": rolling.FINISH[item.finish], "min_margin": margin,
                "min_margin_at": None if margin is None else item.margin_at,
                "output_preview": _preview(mine, OUT_TEXT),
            }  # fmt: skip
            self.groups.count(run, row)

    def _input_keys(self, run: dict[str, Any]) -> dict[tuple[int, int], tuple[Any, Any]]:
        here = self.rows.inputs.get(run["id"])
        if here is not None:
            return here
        found = self.bulk.run(
            "select prompt_index, return_index, input_key, input_preview from sequences where run=?", (run["id"],)
        )
        return {(row, ret): (key, preview) for row, ret, key, preview in found}

    def _note(self, record: Noted) -> bytes:
        if record.kind == "weights":
            self.documents.add_weights(record)
        elif record.kind == "binding":
            self._write()  # the runs it speaks of must be rows by now
            rolling.bind(self.groups, self.id, orjson.loads(record.document))
        elif record.kind in ("gap", "erased", "clock_step"):
            self.event(record.kind, record.seq, orjson.loads(record.document))
        else:
            self.documents.add_fingerprint(record)
        return leaves.of_note(self.stream.stream_id, record)

    # -- payloads ---------------------------------------------------------------------------------

    def _payloads(self, run: dict[str, Any], payloads: Sequence[Payload], salts: Sequence[bytes]) -> list[bytes]:
        """Make the references and bodies of some payloads, and return their commitments."""
        number, at = run["id"], run["started_at"]
        month = _month(at)
        commitments = []
        for item, salt in zip(payloads, salts, strict=True):
            role, encoding, data, row, ret, part = item
            commitment = leaves.committed(item, salt)
            commitments.append(commitment)
            if encoding & SEALED:
                body, size = None, leaves.size(item)
            else:
                body, size = self.bodies.want(digests.body_key(self.key, data), month, item), len(data)
            self.rows.refs.append([number, at, role, row, ret, part, encoding & ~BLOB, size, commitment, salt, body])
        return commitments

    def _key(self, payloads: Sequence[Payload], roles: set[int], kind: str) -> bytes | None:
        """Return the equality key of a sequence's input or output: over the keys of its parts, in order."""
        parts = sorted((p.role, p.part, self._part(p)) for p in payloads if p.role in roles)
        return digests.equality(self.key, kind, tuple(part for _, _, part in parts)) if parts else None

    def _part(self, payload: Payload) -> bytes:
        if payload.encoding & SEALED:
            return payload.data[32:64]
        return digests.equality(self.key, str(payload.encoding & KIND), (payload.data,))


def _preview(payloads: Sequence[Payload], roles: tuple[int, ...]) -> str | None:
    for item in payloads:
        if item.role in roles and not item.encoding & SEALED:
            return clean(item.data[: 4 * PREVIEW].decode("utf-8", "replace")[:PREVIEW])
    return None


def _seed(value: object) -> int | None:
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def _month(ns: int) -> int:
    return _month_of_day(ns // DAY)


@lru_cache(maxsize=64)
def _month_of_day(day: int) -> int:
    moment = datetime.fromtimestamp(day * 86_400, UTC)
    return moment.year * 12 + moment.month - 1


def _uuid(data: bytes) -> str:
    """Write a UUID as `uuid.UUID` does, in a quarter of the time."""
    text = data.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _seen(record: Record, fallback: int) -> int:
    if isinstance(record, Start):
        return record.request.wall_ns
    return record.output.wall_ns if isinstance(record, End) else fallback
