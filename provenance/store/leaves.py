"""The leaf of a journal record: the bytes that the log hashes, stored as they are hashed.

A leaf is the head of its record, with a commitment in place of each payload: identities, times, digests of
fingerprints, outcome and facts of the call. It holds no content and no digest of content. It is a pure function
of the frame and its stream, so a frame drained twice gives the same leaf (``tests/golden/`` holds one of each
kind). An end's leaf names its start's, so the two cannot be parted. Little-endian:

    version u8 · kind u8 · stream 16s · seq u64, then for
    a start   run 16s · parent 16s · wall ns i64 · monotonic ns i64 · environment 32s · switches 32s ·
              model 32s · load u32 · rows u32 · payloads u32 · facts size u32 · facts · payloads
    an end    run 16s · start seq u64 · wall ns i64 · monotonic ns i64 · duration ns i64 · status u32 ·
              settings 32s · weights 32s · start's leaf hash 32s · sequences u32 · payloads u32 · facts size u32 ·
              facts · sequences · payloads
    a note    code u8 · digest 32s · SHA-256 of its document 32s
    a payload role u8 · encoding u8 · part u16 · row u32 · return u32 · size u64 · commitment 32s

`describe` reads one back for people.
"""

import hashlib
import struct
import uuid
from collections.abc import Sequence
from typing import Any

import orjson

from provenance.facts import (
    FINISHES,
    KIND,
    NOTES,
    ROLES,
    SEALED,
    SEQUENCE,
    STATUSES,
    TRUNCATED,
    End,
    Noted,
    Payload,
    SequenceEnd,
    Start,
)
from provenance.integrity import digests
from provenance.integrity.canonical import named

VERSION = 1
START, END, NOTE = 1, 2, 3
HEAD = struct.Struct("<BB16sQ")
START_BODY = struct.Struct("<16s16sqq32s32s32sIIII")
END_BODY = struct.Struct("<16sQqqqI32s32s32sIII")
NOTE_BODY = struct.Struct("<B32s32s")
ENTRY = struct.Struct("<BBHIIQ32s")
NOTE_CODES = {name: code for code, name in NOTES.items()}


def salt(payload: Payload, seed: bytes) -> bytes:
    """Return the salt of a payload: its place under the seed of its frame."""
    return digests.salt(seed, payload.role, payload.row, payload.ret * 65536 + payload.part)


def committed(payload: Payload, salt: bytes) -> bytes:
    """Return the commitment of a payload: computed, or as the capturing process sealed it."""
    return payload.data[:32] if payload.encoding & SEALED else digests.commitment(salt, payload.data)


def size(payload: Payload) -> int:
    """Return the size of a payload's content."""
    return int.from_bytes(payload.data[64:72], "little") if payload.encoding & SEALED else len(payload.data)


def of_start(stream: bytes, record: Start, commitments: Sequence[bytes]) -> bytes:
    """Return the leaf of a start record."""
    r = record.request
    body = START_BODY.pack(
        r.run_id, r.parent, r.wall_ns, r.mono_ns, r.environment, r.switches, r.model, r.load, r.rows,
        len(r.payloads), len(r.facts),
    )  # fmt: skip
    return HEAD.pack(VERSION, START, stream, record.seq) + body + r.facts + _entries(r.payloads, commitments)


def of_end(stream: bytes, record: End, start_leaf: bytes, commitments: Sequence[bytes]) -> bytes:
    """Return the leaf of an end record. ``start_leaf`` is the leaf hash of its start."""
    o = record.output
    body = END_BODY.pack(
        o.run_id, o.start_seq, o.wall_ns, o.mono_ns, o.duration_ns, o.status, o.settings, o.weights, start_leaf,
        len(o.sequences), len(o.payloads), len(o.facts),
    )  # fmt: skip
    table = b"".join(SEQUENCE.pack(*item) for item in o.sequences)
    return HEAD.pack(VERSION, END, stream, record.seq) + body + o.facts + table + _entries(o.payloads, commitments)


def of_note(stream: bytes, record: Noted) -> bytes:
    """Return the leaf of a fingerprint, a binding, a gap or another note: the digest of its document binds it."""
    body = NOTE_BODY.pack(NOTE_CODES[record.kind], record.digest, hashlib.sha256(record.document).digest())
    return HEAD.pack(VERSION, NOTE, stream, record.seq) + body


def _entries(payloads: Sequence[Payload], commitments: Sequence[bytes]) -> bytes:
    pieces = []
    for p, value in zip(payloads, commitments, strict=True):
        role, encoding, data, row, ret, part = p
        length = size(p) if encoding & SEALED else len(data)
        pieces.append(ENTRY.pack(role, encoding & (KIND | TRUNCATED), part, row, ret, length, value))
    return b"".join(pieces)


# -- reading back -----------------------------------------------------------------------------------


def describe(leaf: bytes) -> dict[str, Any]:
    """Return what a leaf says, in words.

    Raises ValueError or struct.error for bytes that are no leaf of this version.
    """
    version, kind, stream, seq = HEAD.unpack_from(leaf)
    if version != VERSION or kind not in (START, END, NOTE):
        raise ValueError(f"no leaf: version {version}, kind {kind}")
    said: dict[str, Any] = {"stream": stream.hex(), "seq": seq}
    if kind == NOTE:
        code, digest, document = NOTE_BODY.unpack_from(leaf, HEAD.size)
        return said | {"kind": NOTES[code], "digest": named(digest), "document": "sha256:" + document.hex()}
    return said | (_describe_start(leaf) if kind == START else _describe_end(leaf))


def _describe_start(leaf: bytes) -> dict[str, Any]:
    run, parent, wall, mono, environment, switches, model, load, rows, count, facts = START_BODY.unpack_from(
        leaf, HEAD.size
    )
    place = HEAD.size + START_BODY.size
    return {
        "kind": "start", "run": str(uuid.UUID(bytes=run)), "parent": str(uuid.UUID(bytes=parent)), "wall_ns": wall,
        "mono_ns": mono, "environment": named(environment), "switches": named(switches), "model": named(model),
        "load": load, "rows": rows, "facts": orjson.loads(leaf[place : place + facts]),
        "payloads": _describe_entries(leaf, place + facts, count),
    }  # fmt: skip


def _describe_end(leaf: bytes) -> dict[str, Any]:
    (run, start_seq, wall, mono, duration, status, settings, weights, start, many, count, facts) = END_BODY.unpack_from(
        leaf, HEAD.size
    )
    place = HEAD.size + END_BODY.size
    table = place + facts
    rows = [SequenceEnd(*SEQUENCE.unpack_from(leaf, table + n * SEQUENCE.size)) for n in range(many)]
    return {
        "kind": "end", "run": str(uuid.UUID(bytes=run)), "start_seq": start_seq, "wall_ns": wall, "mono_ns": mono,
        "duration_ns": duration, "status": STATUSES[status], "settings": named(settings), "weights": named(weights),
        "start_leaf": start.hex(), "facts": orjson.loads(leaf[place:table]),
        "sequences": [row._asdict() | {"finish": FINISHES[row.finish]} for row in rows],
        "payloads": _describe_entries(leaf, table + many * SEQUENCE.size, count),
    }  # fmt: skip


def _describe_entries(leaf: bytes, place: int, count: int) -> list[dict[str, Any]]:
    found = []
    for n in range(count):
        role, encoding, part, row, ret, length, value = ENTRY.unpack_from(leaf, place + n * ENTRY.size)
        found.append(
            {"role": ROLES.get(role, str(role)), "encoding": encoding, "part": part, "row": row, "return": ret,
             "size": length, "commitment": value.hex()}
        )  # fmt: skip
    return found
