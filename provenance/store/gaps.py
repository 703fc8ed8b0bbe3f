"""What is missing, and why. Numbers are dense within a stream, so a record that is not there leaves a hole.

Each hole is cut into pieces, and each piece has one explanation: a gap record of the process itself, damaged bytes, a
record that the store refused, a process that still runs and may yet say why, or nothing at all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, Engine, text

DECLARED, UNCERTAIN, DAMAGED, REFUSED, PENDING, UNDECLARED = (
    "declared", "uncertain", "damaged", "refused", "pending", "undeclared",
)  # fmt: skip
KINDS = (DECLARED, UNCERTAIN, DAMAGED, REFUSED, PENDING, UNDECLARED)
WRONG = {DAMAGED, REFUSED, UNDECLARED}
STILL = "its process runs, and may yet say why"
SILENCE = "nothing says why"
HOLES = """
select stream, seq + 1, following - 1 from
    (select stream, seq, lead(seq) over (partition by stream order by seq) as following from ingested) as pairs
    where following > seq + 1
union all
select stream, 0, min(seq) - 1 from ingested group by stream having min(seq) > 0
union all
select id, there + 1, last_seq from
    (select id, last_seq, coalesce((select max(seq) from ingested where stream = streams.id), -1) as there from streams)
    as ends where last_seq > there
order by 1, 2
"""


class Piece(NamedTuple):
    """Numbers that are missing from a stream, all for one reason."""

    stream: str
    first: int
    last: int
    kind: str
    why: str

    @property
    def size(self) -> int:
        """Return how many."""
        return self.last + 1 - self.first


class Reason(NamedTuple):
    """What an event says of some numbers of its stream. Damage says it of all from the first on, to the next record."""

    first: int
    last: int | None
    kind: str
    why: str


@dataclass
class Account:
    """The whole account of a store."""

    streams: int = 0
    records: int = 0
    pieces: list[Piece] = field(default_factory=list)
    tails: list[Piece] = field(default_factory=list)  # torn by the death of a process: it acknowledged nothing there
    uncertain: int = 0  # records that are here although a flush failed
    alarms: list[tuple[str, int, str]] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)

    def missing(self, kind: str) -> int:
        """Count the numbers missing for one kind of reason."""
        return sum(piece.size for piece in self.pieces if piece.kind == kind)

    @property
    def wrong(self) -> bool:
        """Say whether anything is lost that its process did not declare, or is not as it was written."""
        return bool(self.alarms) or any(piece.kind in WRONG for piece in self.pieces)


class _Stream(NamedTuple):
    name: str
    last_seq: int
    ended: bool


def account(engine: Engine, living: Iterable[str] = ()) -> Account:
    """Account for every number of every stream. ``living`` names the streams whose process still appends."""
    found = Account()
    alive = set(living)
    with engine.connect() as connection:
        streams = _streams(connection, found)
        reasons = _reasons(connection, streams, found)
        for number, first, last in connection.execute(text(HOLES)):
            rest = (PENDING, STILL) if streams[number].name in alive else (UNDECLARED, SILENCE)
            found.pieces += explain(streams[number].name, first, last, reasons.get(number, []), rest)
        found.records = int(connection.execute(text("select count(*) from ingested")).scalar() or 0)
        rows = connection.execute(text("select status, count(*) from runs group by status order by status"))
        found.runs = {str(status): int(count) for status, count in rows}
    return found


def explain(stream: str, first: int, last: int, reasons: Iterable[Reason], rest: tuple[str, str]) -> list[Piece]:
    """Cut a hole into pieces of one reason each; ``rest`` is the kind and the words for what no event explains.

    >>> explain("a", 3, 9, [Reason(4, 5, "declared", "full"), Reason(8, None, "damaged", "bytes")], ("undeclared", "?"))
    ... # doctest: +NORMALIZE_WHITESPACE
    [Piece(stream='a', first=3, last=3, kind='undeclared', why='?'),
     Piece(stream='a', first=4, last=5, kind='declared', why='full'),
     Piece(stream='a', first=6, last=7, kind='undeclared', why='?'),
     Piece(stream='a', first=8, last=9, kind='damaged', why='bytes')]
    """
    pieces: list[Piece] = []
    open_ = [(first, last)]
    # What a process said itself comes before what was seen of its bytes.
    for reason in sorted(reasons, key=lambda item: (KINDS.index(item.kind), item.first)):
        left: list[tuple[int, int]] = []
        for one, end in open_:
            low = max(one, reason.first)
            high = end if reason.last is None else min(end, reason.last)
            if low > high:
                left.append((one, end))
                continue
            pieces.append(Piece(stream, low, high, reason.kind, reason.why))
            left += [span for span in ((one, low - 1), (high + 1, end)) if span[0] <= span[1]]
        open_ = left
    pieces += [Piece(stream, one, end, *rest) for one, end in open_]
    return sorted(pieces, key=lambda piece: piece.first)


def _streams(connection: Connection, found: Account) -> dict[int, _Stream]:
    streams = {}
    for number, name, last_seq, ended, about in connection.execute(
        text("select id, stream_id, last_seq, ended, about from streams")
    ):
        streams[number] = _Stream(bytes(name).hex(), last_seq, bool(ended))
        level = _level(about)
        found.levels[level] = found.levels.get(level, 0) + 1
    found.streams = len(streams)
    return streams


def _level(about: str) -> str:
    try:
        return str(orjson.loads(about).get("durability", "process"))
    except (ValueError, AttributeError):
        return "process"


def _reasons(connection: Connection, streams: Mapping[int, _Stream], found: Account) -> dict[int, list[Reason]]:
    """Read what the events say; note alarms, torn tails and uncertain records on the way."""
    reasons: dict[int, list[Reason]] = {}
    rows = connection.execute(
        text("select stream, seq, kind, detail from events where kind in ('gap', 'damage', 'alarm') order by id")
    )
    for number, seq, kind, detail in rows.all():
        said = orjson.loads(detail)
        stream = streams[number]
        mine = reasons.setdefault(number, [])
        if kind == "gap" and said["first"] == said["last"] == seq:  # it stands under the number of what it replaces
            found.alarms.append((stream.name, seq, f"the record cannot be read: {said['reason']}"))
        elif kind == "gap":
            mine.append(_gap(connection, number, said, found))
        elif kind == "alarm" and "cannot be stored" in said["why"]:
            mine.append(Reason(seq, seq, REFUSED, str(said.get("reason", said["why"]))))
        elif kind == "alarm":
            found.alarms.append((stream.name, seq, str(said["why"])))
        else:
            where = f"bytes {said['from_byte']}-{said['to_byte']} of segment {said['segment']} are damaged"
            if stream.ended and seq >= stream.last_seq:
                found.tails.append(Piece(stream.name, seq + 1, seq + 1, DAMAGED, where))
            else:
                mine.append(Reason(seq + 1, None, DAMAGED, where))
    return reasons


def _gap(connection: Connection, number: int, said: Mapping[str, object], found: Account) -> Reason:
    first, last = int(str(said["first"])), int(str(said["last"]))
    if not said.get("uncertain"):
        return Reason(first, last, DECLARED, str(said["reason"]))
    there = text("select count(*) from ingested where stream = :stream and seq between :first and :last")
    found.uncertain += int(connection.execute(there, {"stream": number, "first": first, "last": last}).scalar() or 0)
    return Reason(first, last, UNCERTAIN, str(said["reason"]))
