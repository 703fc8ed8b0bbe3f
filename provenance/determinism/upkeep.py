"""What `doctor` looks for in a store and its spool: what is lost first, then what may be, then what is merely old."""

import re
from collections.abc import Iterator

from provenance.determinism.doctor import COSTS, NOTE, SERIOUS, WARNING, Hit, Patient, Rule, Upkeep

SLOW_SECONDS, SLOW_RECORDS = 60.0, 10_000
LITTLE, SCARCE, SHARE = 100 << 20, 1 << 30, 0.02
# SQLite 3.7.0 to 3.51.2 can damage a database in WAL mode if two connections write or check it in at one moment; the
# fix went into three older lines as well. Our one writer a store is elected, so it takes a stranger who writes too.
FIXED = ((3, 44, 6), (3, 50, 7), (3, 51, 3))
EVENTS = "provenance sql \"select * from events where kind = '{}'\""


def _state(patient: Patient) -> Upkeep:
    return patient.upkeep or Upkeep()


def _alarms(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).alarms
    if count:
        yield Hit(f"{count} alarms: a record came twice with other bytes, or an end without its beginning",
                  EVENTS.format("alarm"))  # fmt: skip


def _holes(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).holes
    if count:
        yield Hit(f"{count} records are missing in the numbering, and nothing says why: a segment was removed, or not "
                  "brought over", "provenance import FOLDER, if the segments lie on another host")  # fmt: skip


def _damage(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).damaged
    if count:
        yield Hit(f"{count} places of the journal were no records; their segments are kept as *.damaged beside it",
                  EVENTS.format("damage"))  # fmt: skip


def _gaps(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).gaps
    if count:
        yield Hit(f"{count} records could not be written when they were made; the journal says which and why",
                  EVENTS.format("gap"))  # fmt: skip


def _schema(patient: Patient) -> Iterator[Hit]:
    said = _state(patient).mismatch
    if said:
        behind = "older" in said
        yield Hit(said.rstrip("."), "provenance db upgrade" if behind else "pip install --upgrade inference-provenance")


def _unread(patient: Patient) -> Iterator[Hit]:
    said = _state(patient).unread
    if said:
        yield Hit(f"it could not be read: {said.rstrip('.')}", "provenance db current")


def _key(patient: Patient) -> Iterator[Hit]:
    said = _state(patient).key
    if said:
        what, _, line = said.rstrip(".").partition("; run: ")
        yield Hit(what, line or "PROVENANCE_KEY_FILE=PATH")


def _modes(patient: Patient) -> Iterator[Hit]:
    for path, mode, most in _state(patient).modes:
        if mode & ~most:
            yield Hit(f"{path} has mode {mode:04o}: others of this machine can read prompts in it",
                      f"chmod {most:04o} {path}")  # fmt: skip


def _disk(patient: Patient) -> Iterator[Hit]:
    for path, free, total in _state(patient).free:
        if free < max(SCARCE, SHARE * total):
            share = 100 * free / total if total else 0.0
            room = f"{free / (1 << 20):,.0f} MB are free at {path}, {share:.1f} % of the disk"
            yield Hit(f"{room}: when it is full, calls run on and are not recorded",
                      "make room, or PROVENANCE_DB=PATH on another disk",
                      SERIOUS if free < LITTLE else WARNING)  # fmt: skip


def _lag(patient: Patient) -> Iterator[Hit]:
    state = _state(patient)
    if not state.waiting:
        return
    slow = state.oldest > SLOW_SECONDS or state.waiting > SLOW_RECORDS
    runs = "a writer is at work" if state.writer else "no writer is at work"
    because = f"{state.waiting} records wait in the spool, since {state.oldest:,.0f} s at most, and {runs}"
    yield Hit(because, "provenance writer", WARNING if slow else NOTE)


def _complaints(patient: Patient) -> Iterator[Hit]:
    state = _state(patient)
    if state.complaints:
        yield Hit(f"its log ends: {state.complaints[-1]}", "provenance writer, which says what is wrong",
                  WARNING if state.waiting else NOTE)  # fmt: skip


def _partial(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).partial
    if count:
        yield Hit(f"of {count} calls the recorder could not read the end: an error of ours, and their outputs are not "
                  "kept", "provenance log --status partial")  # fmt: skip


def _crashed(patient: Patient) -> Iterator[Hit]:
    count = _state(patient).crashed
    if count:
        yield Hit(f"{count} calls began and their process ended within them", "provenance log --status crashed")


def _disabled(patient: Patient) -> Iterator[Hit]:
    if _state(patient).disabled:
        yield Hit("PROVENANCE_DISABLED is set: nothing is recorded from this shell", "unset PROVENANCE_DISABLED")


def _empty(patient: Patient) -> Iterator[Hit]:
    state = _state(patient)
    if not state.there:
        yield Hit(f"there is no database at {state.database}", "provenance demo, or provenance.wrap(model)")


def _content(patient: Patient) -> Iterator[Hit]:
    state = _state(patient)
    if state.capture == "full":
        where = "on the server of the database" if state.server else "in a file of this user's"
        yield Hit(f"capture = full: prompts and outputs are kept in clear {where}", "PROVENANCE_CAPTURE=digest")


def _sqlite(patient: Patient) -> Iterator[Hit]:
    text = _state(patient).sqlite
    if text and not fixed(text):
        yield Hit(f"SQLite {text} can damage a database if two connections write to it at one moment: ours is one, so "
                  "this needs somebody else who writes", "SQLite 3.51.3 or later, or 3.50.7, or 3.44.6")  # fmt: skip


def fixed(text: str) -> bool:
    """Say whether a release of SQLite has the fix.

    >>> fixed("3.40.1"), fixed("3.44.6"), fixed("3.45.0"), fixed("3.51.3"), fixed("3.53.0")
    (False, True, False, True, True)
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", text)[:3])
    return numbers >= FIXED[-1] or any(numbers[:2] == line[:2] and numbers >= line for line in FIXED)


FREE = COSTS["free"]
RULES: tuple[Rule, ...] = (
    Rule("records that contradict each other", "store", SERIOUS, 5, _alarms, FREE),
    Rule("records are missing", "store", SERIOUS, 5, _holes, FREE),
    Rule("files that others can read", "store", SERIOUS, 4, _modes, FREE),
    Rule("the schema", "store", SERIOUS, 4, _schema, "a copy of the tables, while nothing is written"),
    Rule("the key", "store", SERIOUS, 4, _key, FREE),
    Rule("the store", "store", SERIOUS, 4, _unread, FREE),
    Rule("room on the disk", "store", WARNING, 4, _disk, "disk"),
    Rule("damage in the journal", "store", WARNING, 4, _damage, FREE),
    Rule("records that could not be written", "store", WARNING, 3, _gaps, FREE),
    Rule("recording is off", "store", WARNING, 4, _disabled, "what recording costs: docs/journal.md"),
    Rule("records wait", "store", WARNING, 3, _lag, FREE),
    Rule("errors of the recorder", "store", WARNING, 3, _partial, FREE),
    Rule("the writer complained", "store", NOTE, 3, _complaints, FREE),
    Rule("calls that never ended", "store", NOTE, 1, _crashed, FREE),
    Rule("an old SQLite", "store", NOTE, 1, _sqlite, FREE),
    Rule("content is kept", "store", NOTE, 0, _content, "texts, ids and their comparison by content"),
    Rule("nothing recorded yet", "store", NOTE, 0, _empty, FREE),
)  # fmt: skip
