"""Ends whose starts are not here: a segment was imported before the one that it follows, or was lost.

An end is held whole until its start comes, and then completes the call as if it had come in order; what it brought
is deleted here at that moment. Its salts are held and not the seed that they come from, which is stored nowhere.
What is held is one line of JSON, the head, and then the payloads one behind the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from provenance.facts import SEQUENCE, End, Output, Payload, SequenceEnd
from provenance.store import tables
from provenance.store.rows import Bulk

SALT = 32
HEXED = ("run_id", "settings", "weights", "facts")


class Held(NamedTuple):
    """An end without its start, and the salts of its payloads."""

    record: End
    salts: list[bytes]


def hold(bulk: Bulk, stream: int, record: End, salts: Sequence[bytes]) -> None:
    """Hold an end until its start comes."""
    row = (stream, record.output.start_seq, record.seq, b"".join(salts), write(record.output))
    bulk.insert(tables.early_ends, [row], ignore=True)


def among(bulk: Bulk, stream: int, first: int, last: int) -> dict[int, Held]:
    """Return the ends that are held of the calls that begin within a range, by their starts."""
    found = bulk.run(
        "select start_seq, seq, salts, record from early_ends where stream=? and start_seq between ? and ? "
        "and record is not null",
        (stream, first, last),
    )
    return {start: Held(End(seq, bytes(SALT), read(data)), _salts(bytes(salts))) for start, seq, salts, data in found}


def release(bulk: Bulk, stream: int, start: int) -> None:
    """Forget what was held: the writer may not delete, so an empty row stays."""
    bulk.run("update early_ends set salts=null, record=null where stream=? and start_seq=?", (stream, start))


def write(output: Output) -> bytes:
    """Return an output as bytes."""
    head: dict[str, Any] = output._asdict()
    head |= {name: head[name].hex() for name in HEXED}
    head["sequences"] = [SEQUENCE.pack(*item).hex() for item in output.sequences]
    head["payloads"] = [[p.role, p.encoding, len(p.data), p.row, p.ret, p.part] for p in output.payloads]
    return b"".join([orjson.dumps(head), b"\n", *(item.data for item in output.payloads)])


def read(data: bytes) -> Output:
    """Read what ``write`` wrote."""
    line, _, bodies = bytes(data).partition(b"\n")
    head: dict[str, Any] = orjson.loads(line)
    head |= {name: bytes.fromhex(head[name]) for name in HEXED}
    head["sequences"] = tuple(SequenceEnd(*SEQUENCE.unpack(bytes.fromhex(item))) for item in head["sequences"])
    payloads, place = [], 0
    for role, encoding, size, row, ret, part in head["payloads"]:
        payloads.append(Payload(role, encoding, bodies[place : place + size], row, ret, part))
        place += size
    return Output(**head | {"payloads": tuple(payloads)})


def _salts(data: bytes) -> list[bytes]:
    return [data[place : place + SALT] for place in range(0, len(data), SALT)]
