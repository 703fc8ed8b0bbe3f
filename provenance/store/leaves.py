"""The leaf of a journal record: the bytes that the log hashes, stored as they are hashed.

A leaf holds identities, times, digests of fingerprints, the outcome, facts of the call and one commitment for
each payload. It holds no content and no digest of content. It is a pure function of the frame and the stream,
so a frame drained twice gives the same leaf (``tests/golden/`` holds one of each kind). An end's leaf names its
start's.
"""

import uuid

import orjson

from provenance.facts import ROLES, SEALED, STATUSES, End, Noted, Payload, SequenceEnd, Start
from provenance.integrity import digests
from provenance.integrity.canonical import canonical, named, plain

NOTHING = bytes(32)


def commit(payload: Payload, seed: bytes) -> tuple[bytes, bytes]:
    """Return salt and commitment of a payload: computed, or as the capturing process sealed them."""
    salt = digests.salt(seed, payload.role, payload.row, payload.ret * 65536 + payload.part)
    if payload.encoding & SEALED:
        return salt, payload.data[:32]
    return salt, digests.commitment(salt, payload.data)


def size(payload: Payload) -> int:
    """Return the size of a payload's content."""
    return int.from_bytes(payload.data[64:72], "little") if payload.encoding & SEALED else len(payload.data)


def of_start(stream: bytes, record: Start, commitments: list[bytes]) -> bytes:
    """Return the leaf of a start record."""
    request = record.request
    return canonical(
        {
            "v": 1, "kind": "start", "stream": stream.hex(), "seq": record.seq,
            "run": str(uuid.UUID(bytes=request.run_id)),
            "parent": None if request.parent == bytes(16) else str(uuid.UUID(bytes=request.parent)),
            "wall_ns": str(request.wall_ns), "mono_ns": str(request.mono_ns),
            "environment": named(request.environment), "switches": named(request.switches),
            "model": None if request.model == NOTHING else named(request.model),
            "load": request.load, "rows": request.rows,
            "facts": plain(orjson.loads(request.facts)),
            "commitments": _commitments(request.payloads, commitments),
        }
    )  # fmt: skip


def of_end(stream: bytes, record: End, start_leaf: bytes, commitments: list[bytes]) -> bytes:
    """Return the leaf of an end record. ``start_leaf`` is the leaf hash of its start."""
    output = record.output
    return canonical(
        {
            "v": 1, "kind": "end", "stream": stream.hex(), "seq": record.seq,
            "run": str(uuid.UUID(bytes=output.run_id)), "start_seq": output.start_seq, "start": start_leaf.hex(),
            "wall_ns": str(output.wall_ns), "mono_ns": str(output.mono_ns), "duration_ns": str(output.duration_ns),
            "status": STATUSES[output.status],
            "settings": None if output.settings == NOTHING else named(output.settings),
            "weights": None if output.weights == NOTHING else named(output.weights),
            "facts": plain(orjson.loads(output.facts)),
            "sequences": [_sequence(item) for item in output.sequences],
            "commitments": _commitments(output.payloads, commitments),
        }
    )  # fmt: skip


def of_note(stream: bytes, record: Noted) -> bytes:
    """Return the leaf of a fingerprint, a binding, a gap or another note: its document's digest binds it."""
    return canonical(
        {
            "v": 1, "kind": record.kind, "stream": stream.hex(), "seq": record.seq, "digest": named(record.digest),
            "document": digests.file_digest(record.document),
        }
    )  # fmt: skip


def _commitments(payloads: tuple[Payload, ...], values: list[bytes]) -> list[object]:
    return [
        [ROLES.get(item.role, str(item.role)), item.row, item.ret, item.part, size(item), value.hex()]
        for item, value in zip(payloads, values, strict=True)
    ]


def _sequence(item: SequenceEnd) -> list[object]:
    numbers: list[object] = [item.row, item.ret, item.n_input, item.n_output, item.padding, item.finish]
    return [*numbers, plain(item.margin), item.margin_at]
