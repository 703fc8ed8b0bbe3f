"""How often equal inputs gave unequal outputs, read from the counts that the writer keeps: no run is looked at.

The counts are added up by the database, by stretches of an hour, a day or a week; what is in memory is as many rows as
there are stretches, times the labels that were asked for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, func, select

from provenance.facts import Field, Fingerprint
from provenance.store import tables
from provenance.store.pairs import HOUR
from provenance.store.queries import MODEL_NAMES

BY = ("model", "host", "gpu", "version")
HOURS_SHOWN, DAYS_SHOWN = 72, 800  # up to so long a time is shown by the hour, by the day
GPU = ("gpu.0.name", "cpu.model")  # where there is no GPU, what it ran on
VERSIONS = {
    "gpu.driver_version": "driver", "cuda.runtime_version": "CUDA", "torch.version": "torch",
    "lib.transformers.version": "transformers", "lib.sglang.version": "sglang",
    "lib.llama-cpp-python.version": "llama-cpp-python", "lib.openai.version": "openai",
}  # fmt: skip
UNKNOWN = "not known"
NEW_MOST = 20  # environments that came in one stretch, of which the fields are read


@dataclass(frozen=True, slots=True)
class Span:
    """From when to when, in nanoseconds since 1970, by the hour: the whole of an hour that a time lies in."""

    since: int = 0
    until: int = 1 << 62

    @property
    def hours(self) -> tuple[int, int]:
        """Return the first hour, and the one behind the last."""
        return self.since // HOUR, -(-self.until // HOUR)


class Counted(NamedTuple):
    """The pairs of one stretch of time and one label."""

    start: int  # the first hour
    label: str
    across: bool
    pairs: int
    differed: int
    surface: int
    untold: int


class Arrival(NamedTuple):
    """An environment that was seen for the first time in a stretch, and the one that was used most before."""

    before: Mapping[str, Field]
    after: Mapping[str, Field]
    pairs: int


def width(engine: Engine, span: Span) -> int:
    """Return the length of a stretch in hours: an hour, a day or a week, by how long a time there is to show."""
    hour = tables.pair_hours.c.hour
    low, high = span.hours
    with engine.connect() as connection:
        query = select(func.min(hour), func.max(hour)).where(hour >= low, hour < high)
        first, last = connection.execute(query).one()
    if first is None or last - first < HOURS_SHOWN:
        return 1
    return 24 if last - first < 24 * DAYS_SHOWN else 168


def counted(engine: Engine, span: Span, hours: int, by: str = "") -> Iterator[Counted]:
    """Return the counts by stretch and label, in order of time; without ``by`` the label is empty."""
    table = tables.pair_hours
    start = table.c.hour - table.c.hour % hours
    column = {"model": table.c.model, "host": table.c.host, "gpu": table.c.environment, "version": table.c.environment}
    keys = [start.label("start"), table.c.across, *([column[by].label("kind")] if by else [])]
    low, high = span.hours
    sums = (func.sum(table.c[name]) for name in ("pairs", "differed", "surface", "untold"))
    query = select(*keys, *sums).where(table.c.hour >= low, table.c.hour < high).group_by(*keys).order_by(*keys)
    with engine.connect() as connection:
        names = _names(connection, by) if by else {}
        for row in connection.execute(query.execution_options(yield_per=2000)):
            label = names.get(row[2], UNKNOWN) if by and by != "host" else str(row[2] or UNKNOWN) if by else ""
            yield Counted(int(row[0]), label, bool(row[1]), *map(int, row[-4:]))


def _names(connection: Connection, by: str) -> dict[Any, str]:
    """Return the label of each model or environment that there are counts of."""
    if by == "host":
        return {}
    fields = tables.fingerprint_fields
    column = tables.pair_hours.c.model if by == "model" else tables.pair_hours.c.environment
    wanted = {"model": MODEL_NAMES, "gpu": GPU, "version": tuple(VERSIONS)}[by]
    counted_ = fields.c.fingerprint.in_(select(column).distinct())
    query = select(fields.c.fingerprint, fields.c.name, fields.c.value)
    query = query.where(fields.c.name.in_(wanted), fields.c.value.is_not(None), counted_)
    found: dict[Any, dict[str, str]] = {}
    for number, name, value in connection.execute(query):
        found.setdefault(number, {})[name] = value
    if by != "version":
        return {number: next(values[name] for name in wanted if name in values) for number, values in found.items()}
    return {
        number: ", ".join(f"{VERSIONS[name]} {values[name]}" for name in wanted if name in values)
        for number, values in found.items()
    }


def arrivals(engine: Engine, hour: int, hours: int) -> list[Arrival]:
    """Return the environments first seen in a stretch of time or the one before it, with the usual one till then."""
    table = tables.pair_hours
    first = func.min(table.c.hour)
    fresh = (
        select(table.c.environment, func.sum(table.c.pairs))
        .group_by(table.c.environment)
        .having(first >= hour - hours, first < hour + hours)
        .order_by(func.sum(table.c.pairs).desc(), table.c.environment)
        .limit(NEW_MOST)
    )
    with engine.connect() as connection:
        came = [(int(number), int(pairs)) for number, pairs in connection.execute(fresh)]
        usual = connection.execute(
            select(table.c.environment)
            .where(table.c.hour < hour, table.c.environment.not_in([number for number, _ in came]))
            .group_by(table.c.environment)
            .order_by(func.sum(table.c.pairs).desc(), table.c.environment)
            .limit(1)
        ).scalar()
        if usual is None:
            return []
        before = _fields(connection, usual)
        return [Arrival(before, _fields(connection, number), pairs) for number, pairs in came]


def _fields(connection: Connection, number: int) -> Mapping[str, Field]:
    document = connection.execute(
        select(tables.fingerprints.c.document).where(tables.fingerprints.c.id == number)
    ).scalar()
    return Fingerprint.read(bytes(document)).fields if document else {}


def counting_since(engine: Engine) -> int | None:
    """Return the first hour of which there are counts, or None where there is not one pair."""
    with engine.connect() as connection:
        found = connection.execute(select(func.min(tables.pair_hours.c.hour))).scalar()
    return None if found is None else int(found)


def diverged(engine: Engine, span: Span) -> int:
    """Return how many inputs gave more than one output and were asked in a span of time."""
    groups = tables.equal_inputs
    query = select(func.count()).where(
        groups.c.outputs > 1, groups.c.last_at >= span.since, groups.c.first_at < span.until
    )
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())
