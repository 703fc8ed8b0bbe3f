"""Made the golden files beside it, once, when their formats were frozen. No test runs it.

Never make an existing file anew: a golden file that no longer fits the code says that the code has broken the
evidence that people hold, and it is the code that must change. The script refuses to overwrite one. A new format, or a
new migration, gets a new file with a new name.

    python -m tests.golden.make
"""

import sqlite3
import struct
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from provenance import privacy
from provenance.facts import BUFFER, OCTETS, ROLE, VALUE, Field, Fingerprint, Payload, SequenceEnd, State
from provenance.integrity import buffers, digests
from provenance.integrity.canonical import canonical, digest, plain, raw
from provenance.integrity.values import encode
from provenance.journal import frame, records
from provenance.journal.recovery import open_segment
from provenance.store import database
from tests.fakes.records import (
    KEY,
    NOTHING,
    PAYLOADS,
    SEED,
    SEQUENCES,
    WEIGHTS,
    as_json,
    drained,
    framed,
    header,
    ids,
    output,
    places,
    request,
    rows,
    run_id,
    text,
)
from tests.fakes.values import EDGES

HERE = Path(__file__).parent
SALT = bytes(range(200, 216))
OTHER = bytes(range(32, 64))
DOCUMENTS: list[Any] = [
    None, True, [], {}, "", 0, -1, 2**53, -(2**53), 'é𝄞\u2028\x7f\x00"\\/', {"b": 1, "a": {"": [None, False, ""]}, "B": "b"},
    [[[[]]]], {"v": 1, "scope": "environment", "fields": {"gpu.0.name": {"value": "NVIDIA H200", "source": "nvml"}}},
    {"\x00": 1, "\x1f": 2, "~": 3, "A": 4, "_": 5, "a": 6},
]  # fmt: skip
FIELDS = [
    Field("torch.version", "2.13.0+cpu", source="torch"), Field("a.int", 2**60), Field("a.float", 0.1, source="call"),
    Field("a.list", (1, None, {"x": [True]})), Field("a.map", {1: "int", "1": "text"}), Field("a.text", "\ud800é"),
    Field("a.none", None), Field("a.nan", float("nan")), Field.unset("a.unset", "call"), Field.moot("a.moot", "greedy"),
    Field.unknown("gpu.count", "NVML: driver not loaded \udcff"), Field("a.red", None, State.REDACTED, "hook"),
    Field("env.é", "in ascii"),
]  # fmt: skip
PRINTS = {scope: Fingerprint.of(scope, FIELDS) for scope in ("environment", "switches", "model", "settings")}


def write(name: str, data: bytes) -> None:
    """Write a file that is not there yet; one that is there stays for ever."""
    if not (HERE / name).exists():
        (HERE / name).write_bytes(data)


def field_forms() -> list[list[Any]]:
    """Return the fields as JSON."""
    return [[item.name, item.document()] for item in FIELDS]


def all_digests() -> dict[str, Any]:
    """Return inputs and outputs of everything that is hashed."""
    small = {label: value for label, value in EDGES.items() if "depth" not in label}
    numbers: list[list[int]] = [[], [0], [1, -1], [2**31 - 1, -(2**31)], [2**31], [-(2**63), 2**63 - 1]]
    places_: list[tuple[int, int, int]] = [(1, 0, 0), (16, 3, 65536 * 2 + 5), (65535, 2**32 - 1, 2**32 - 1)]
    payloads = [b"", b"x", bytes(range(256))]
    parts: list[list[bytes]] = [[], [b""], [b"ab", b"c"], [b"a", b"bc"]]
    return {
        "canonical": [{"document": d, "bytes": canonical(d).decode(), "digest": digest(canonical(d))} for d in DOCUMENTS],
        "plain": {label: canonical(plain(value)).decode() for label, value in small.items()},
        "values": {label: encode(value).decode() for label, value in EDGES.items()},
        "fields": field_forms(),
        "fingerprints": {
            scope: {"document": p.document.decode(), "digest": p.digest, "value_digest": p.value_digest}
            for scope, p in PRINTS.items()
        },
        "manifest": {"document": WEIGHTS.document().decode(), "root": WEIGHTS.root},
        "buffers": [{"numbers": n, "bytes": buffers.ids(n).hex()} for n in numbers],
        "salts": [{"seed": SEED.hex(), "place": list(p), "salt": digests.salt(SEED, *p).hex()} for p in places_],
        "commitments": [
            {"salt": OTHER.hex(), "payload": p.hex(), "commitment": digests.commitment(OTHER, p).hex()} for p in payloads
        ],
        "equality": [
            {"key": KEY.hex(), "kind": kind, "parts": [item.hex() for item in p],
             "equality": digests.equality(KEY, kind, tuple(p)).hex()}
            for kind in ("", "host", "1") for p in parts
        ],
        "body_keys": [{"key": KEY.hex(), "body": p.hex(), "name": digests.body_key(KEY, p).hex()} for p in payloads],
        "key_ids": {key.hex(): digests.key_id(key) for key in (KEY, OTHER)},
        "leaf_hashes": {p.hex(): digests.leaf_hash(p).hex() for p in payloads},
        "file_digests": {p.hex(): digests.file_digest(p) for p in payloads},
        "markers": {salt.hex(): frame.marker(salt).hex() for salt in (bytes(16), SALT)},
    }  # fmt: skip


# -- the journal --------------------------------------------------------------------------------------


def life() -> list[tuple[int, int, bytes]]:
    """Return the frames of a process life that holds a record of every kind."""
    seeds = iter(bytes([n]) * 32 for n in range(1, 99))
    prints = {
        "environment": PRINTS["environment"].raw,
        "switches": PRINTS["switches"].raw,
        "model": PRINTS["model"].raw,
    }
    frames: list[tuple[int, int, bytes]] = []

    def note(kind: str, value: bytes, document: bytes) -> None:
        frames.append((len(frames), records.frame_kind(kind), b"".join(records.note_payload(kind, value, document))))

    def start(number: int, seed: bytes, **changes: Any) -> int:
        whole = request(number, **{**prints, **changes})
        frames.append((len(frames), frame.START, b"".join(records.start_payload(seed, whole))))
        return len(frames) - 1

    def end(number: int, seq: int, seed: bytes, **changes: Any) -> None:
        whole = output(number, seq, **{"settings": PRINTS["settings"].raw, **changes})
        frames.append((len(frames), frame.END, b"".join(records.end_payload(seed, whole))))

    for scope, item in PRINTS.items():
        note(scope, item.raw, item.document)
    prompt = (ids("prompt.ids", [5, 6, 7]), text("prompt.text", "a prompt"), ids("prompt.ids", [0, 2**40], 1),
              Payload(ROLE["prompt.media"], OCTETS, bytes(range(256)), 1, 0, 3),
              Payload(ROLE["arguments"], VALUE, encode({"args": (1, float("inf"))})))  # fmt: skip
    named = {"name": "nightly", "tags": {"suite": "7", "é": "ü"}, "batch.size": 2, "seed.torch_initial": 7}
    outer = start(1, next(seeds), rows=2, payloads=prompt, facts=named)
    inner = start(2, next(seeds), payloads=(), parent=bytes.fromhex(run_id(1).replace("-", "")))
    end(2, inner, next(seeds), status="error", sequences=(), facts={"error": "ValueError"},
        payloads=(text("error.text", "cannot parse 'a prompt'"),))  # fmt: skip
    note("weights", raw(WEIGHTS.root), WEIGHTS.document())
    evidence = struct.pack("<BBBBI4i4f2f", 1, 2, 0, 2, 2, 8, 3, 9, 8, 2.0, 1.5, 4.0, 4.0, 3.0, 5.0)
    answer = (ids("output.ids", [8, 9]), text("output.text", "an answer"), Payload(ROLE["evidence.logits"], BUFFER, evidence),
              ids("output.ids", [10], 1), Payload(ROLE["output.value"], VALUE, encode({1: -0.0}), 1))  # fmt: skip
    ends = (SequenceEnd(0, 0, 3, 2, 1, 1, 0.5, 0), SequenceEnd(1, 0, 2, 1, 0, 2, float("nan"), 0))
    end(1, outer, next(seeds), sequences=ends, payloads=answer, facts={"sampled": True, "rng.torch_cpu_sha256": "ab"})
    binding = {"from": outer, "kind": "tensors", "load": 1, "root": WEIGHTS.root, "to": len(frames)}
    note("binding", raw(WEIGHTS.root), orjson.dumps(binding))
    note("clock_step", NOTHING, b'{"from":1,"to":2}')
    note("erased", NOTHING, b'{"seq":2}')
    sealed = next(seeds)
    digest_only = privacy.cut(prompt[:2], "digest", sealed, KEY)
    last = start(3, sealed, payloads=digest_only)
    sealed = next(seeds)
    end(3, last, sealed, payloads=privacy.cut(answer[:3], "digest", sealed, KEY))
    start(4, next(seeds), payloads=(text("prompt.text", "the last words"),))
    hole = len(frames)
    gap = b"".join(records.note_payload("gap", NOTHING, b'{"first":%d,"last":%d,"reason":"full"}' % (hole, hole + 1)))
    return [*frames, (hole + 2, frame.GAP, gap)]


def main() -> None:
    """Make what is not there yet."""
    write("digests.json", orjson.dumps(all_digests(), option=orjson.OPT_INDENT_2))
    segment = header(SALT) + b"".join(framed(SALT, *item) for item in life())
    write("journal-v1.seg", segment)
    with tempfile.TemporaryDirectory() as folder:
        spots = places(Path(folder) / "store")
        spots.spool.mkdir(mode=0o700)
        path = spots.spool / "journal-v1.seg"
        path.write_bytes(segment)
        found = [
            {"seq": item.seq, "kind": item.kind, "end": item.end,
             "record": as_json(records.read(item.kind, item.seq, item.payload))}
            for item in open_segment(path).frames(sealed=True)
        ]  # fmt: skip
        leaves = [leaf.hex() for (leaf,) in rows(drained(spots), "select leaf from log_entries order by idx")]
        head = open_segment(HERE / "journal-v1.seg").header
        about = {**asdict(head.stream), **asdict(head)}
        del about["stream"]
        whole = {"key": KEY.hex(), "header": {name: as_json(value) for name, value in about.items()}, "records": found,
                 "leaves": leaves, "sequences": rows(spots, SEQUENCES), "payloads": rows(spots, PAYLOADS)}  # fmt: skip
        write("journal-v1.json", orjson.dumps(whole, option=orjson.OPT_INDENT_2))
        small = Path(folder) / "small.db"
        connection = sqlite3.connect(str(spots.database), isolation_level=None)
        connection.execute(f"vacuum into '{small}'")
        connection.close()
        connection = sqlite3.connect(small, isolation_level=None)
        connection.execute("pragma page_size = 1024")
        connection.execute("vacuum")
        connection.close()
        write(f"store-{database.HEAD}.db", small.read_bytes())


if __name__ == "__main__":
    main()
