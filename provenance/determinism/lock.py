"""What must hold for outputs to stay: a lock of fields, made for git, and its comparison with another day or machine.

Only fields that can move an output stand in it, under what a difference in them can do. A field that could not be read
is listed with its reason: it is neither equal nor drift. Both sides of a comparison go through the same conditions as
an explanation does, so a driver nobody uses is no drift.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from provenance.catalogue.fields import VERSION, spec, table
from provenance.errors import BadFile, BadSetting, NotCanonical
from provenance.explain import conditions
from provenance.explain import fields as explained
from provenance.explain.rules import FILES, IN_FILES, PARENTS
from provenance.facts import Field, Run, State
from provenance.fingerprint.weights import UNREAD
from provenance.integrity.canonical import canonical, digest, plain, restore

FORMAT = 2
ACTING = ("semantic", "numeric", "random")
HEAD = """\
# What the outputs of this program rest on, written by `provenance lock`; compare with `provenance check`.
# semantic: another value computes another function. numeric: the same function with other rounding.
# random: another stream of random numbers. open: could not be read here, with the reason.
# unloaded: nothing of this process had loaded what would tell.
"""
NOTHING = {"none": True}  # TOML has no null


@dataclass(frozen=True, slots=True)
class Change:
    """A field that is not what it was, and what a difference in it can do."""

    name: str
    effect: str
    before: Field
    now: Field
    allowed: bool = False


@dataclass(slots=True)
class Comparison:
    """All differing fields of two tables, sorted by what they mean."""

    changed: list[Change] = field(default_factory=list)
    context: list[Change] = field(default_factory=list)  # cannot act: effect none, or their condition does not hold
    blind: list[explained.Blind] = field(default_factory=list)
    open: list[explained.Blind] = field(default_factory=list)  # a side that ran no model had nothing loaded to tell it
    varied: list[str] = field(default_factory=list)
    alike: list[Change] = field(default_factory=list)  # other files, and the same tensors in them
    equal: int = 0
    note: str = ""

    @property
    def drift(self) -> list[Change]:
        """Return the changes that nobody allowed."""
        return [item for item in self.changed if not item.allowed]

    @property
    def code(self) -> int:
        """Return the exit code: 0 holds, 1 drifted, 3 could not tell."""
        return 1 if self.drift else 3 if self.blind else 0


def compare(
    before: Mapping[str, Field],
    now: Mapping[str, Field],
    allow: Iterable[str] = (),
    vary: Iterable[str] = (),
    around: tuple[Mapping[str, Field], Mapping[str, Field]] | None = None,
    bare: tuple[bool, bool] = (False, False),
) -> Comparison:
    """Compare two tables of fields; ``allow`` and ``vary`` are names or patterns such as ``gpu.*``.

    ``around`` is what conditions ask of the two sides, where the tables hold only a part of them. A side is ``bare``
    whose process ran no model: what it had not loaded, or lacks beside one that did, is open and no difference.

    Raises BadSetting for a name that no field has.
    """
    allowed, varied = patterns(allow, {*before, *now}), patterns(vary, {*before, *now})
    differing, blind = explained.compare(before, now)
    one, other = around or (before, now)
    runs = _run(one), _run(other)
    shared = before.keys() & now.keys()
    found = Comparison(equal=len(shared) - len(differing) - sum(gap.name in shared for gap in blind))
    for item in differing:
        if matches(item.name, varied):
            found.varied.append(item.name)
        elif item.name == FILES and _alike(before.get(IN_FILES), now.get(IN_FILES)):
            found.alike.append(Change(item.name, spec(item.name).effect, item.a, item.b))
        elif any(bare) and (item.a.unloaded or item.b.unloaded):
            found.open.append(explained.Blind(item.name, _unloaded(item)))
        else:
            change = Change(item.name, spec(item.name).effect, item.a, item.b, matches(item.name, allowed))
            (found.changed if _acts(item.name, *runs) else found.context).append(change)
    for gap in blind:
        if _acts(gap.name, *runs) and not matches(gap.name, [*allowed, *varied]):
            quiet = _excused(before.get(gap.name), now.get(gap.name), bare)
            (found.open if quiet else found.blind).append(gap)
    found.changed.sort(key=lambda item: (ACTING.index(item.effect), -spec(item.name).prior, item.name))
    return found


def _alike(one: Field | None, other: Field | None) -> bool:
    return one is not None and one.state is State.VALUE and one == other


def _acts(name: str, *runs: Run) -> bool:
    """Say whether a field can move an output in one of some runs."""
    declared = spec(name)
    acting = declared.effect in ACTING and name not in PARENTS
    return acting and not all(conditions.active(declared.active_when, run) is False for run in runs)


def _excused(one: Field | None, other: Field | None, bare: tuple[bool, bool]) -> bool:
    """Say whether a gap is there because one of the processes ran no model."""
    lacks = any(is_bare and item is None for item, is_bare in zip((one, other), bare, strict=True))
    return (lacks and not all(bare)) or (any(bare) and any(item is not None and item.unloaded for item in (one, other)))


def _unloaded(item: explained.Difference) -> str:
    sides = [(side, seen) for side, seen in (("A", item.a), ("B", item.b)) if seen.unloaded]
    return "; ".join(f"{seen.reason} in {side}" for side, seen in sides)


def patterns(given: Iterable[str], present: Iterable[str]) -> list[str]:
    """Return the patterns as given, if each can mean a field.

    Raises BadSetting for one that cannot.
    """
    known = {*table(), *present}
    checked = list(given)
    for pattern in checked:
        if not any(fnmatchcase(name, pattern) for name in known) and spec(pattern).group == "other":
            import difflib

            close = difflib.get_close_matches(pattern, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else "`provenance env --all` lists them."
            raise BadSetting(f"no field is called {pattern!r}; {hint}")
    return checked


def matches(name: str, given: Iterable[str]) -> bool:
    """Say whether a field is meant by one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in given)


def _run(fields: Mapping[str, Field]) -> Run:
    """Return the fields in the form that conditions are asked of.

    Where no model says which devices it used, a build of torch that knows none but the processor says it too.
    """
    known = dict(fields)
    if "device.in_use" not in known and _cpu_only(known):
        known["device.in_use"] = Field("device.in_use", ["cpu"], source="derived")
    return Run("", "call", "transformers", "generate", "ok", 0, None, known, ())


def _cpu_only(fields: Mapping[str, Field]) -> bool:
    version = conditions.value(fields, "torch.version")
    other = (conditions.value(fields, name) for name in ("cuda.runtime_version", "rocm.version", "mps.device_name"))
    return isinstance(version, str) and version.endswith("+cpu") and not any(other)


def part(name: str) -> str:
    """Say what a field belongs to: the process, a model, the settings, or one call.

    >>> part("torch.num_threads"), part("model.dtype"), part("generation.top_p"), part("batch.size")
    ('process', 'model', 'settings', 'call')
    """
    declared = spec(name)
    if declared.group in ("framework_flags", "determinism_flags") and declared.scope == "call":
        return "process"  # a switch that can be thrown between two calls
    return "settings" if declared.group == "generation" else declared.scope


def lasts(name: str) -> bool:
    """Say whether a field is more than a fact of the one call that it was read in."""
    return part(name) != "call"


# -- the file ---------------------------------------------------------------------------------------


def dumps(fields: Mapping[str, Field], about: Mapping[str, str], keep_all: bool = False) -> str:
    """Return the text of a lock: fields that can act, by effect and in the order of their names."""
    import tomli_w

    run = _run(fields)
    parts: dict[str, dict[str, Any]] = {effect: {} for effect in (*ACTING, "open", "unloaded")}
    for name, item in sorted(fields.items()):
        if not _acts(name, run) and not keep_all and not (name == IN_FILES and item.known):
            continue
        effect = spec(name).effect
        if item.state is State.VALUE:
            parts[effect if effect in ACTING else "semantic"][name] = _toml(item.value)
        elif not item.known:
            parts["open"][name] = f"{item.state.value}: {item.reason}" if item.reason else item.state.value
        elif item.unloaded:
            parts["unloaded"].setdefault(item.reason, []).append(name)
    lines = {"format": FORMAT, "catalogue": VERSION, **about, "fields": _count(parts)}
    document = {"lock": lines, **{k: v for k, v in parts.items() if v}}
    document["lock"]["digest"] = _digest(tomllib.loads(tomli_w.dumps(document)))
    return HEAD + "\n" + tomli_w.dumps(document)


def _count(form: Mapping[str, Any]) -> int:
    """Count the fields in the tables of a lock."""
    tables = [form.get(name, {}) for name in (*ACTING, "open")]
    return sum(map(len, tables)) + sum(map(len, form.get("unloaded", {}).values()))


def _digest(form: Mapping[str, Any]) -> str:
    """Digest what a lock says, its own digest apart: comments and white space may change."""
    about = {key: value for key, value in form["lock"].items() if key != "digest"}
    return digest(canonical(plain({**form, "lock": about})))


def _toml(value: object) -> object:
    if value is None:
        return NOTHING
    if isinstance(value, Mapping):
        return {str(key): _toml(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_toml(item) for item in value]
    return value if isinstance(value, float) else plain(value)


def _untoml(value: object) -> object:
    if value == NOTHING:
        return None
    if isinstance(value, dict):
        return restore({key: _untoml(item) for key, item in value.items()})
    return [_untoml(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class Lock:
    """One side of a comparison: its fields. A lock as read says of itself what it is; only it has ``about``."""

    fields: Mapping[str, Field]
    about: Mapping[str, Any] = field(default_factory=dict)
    around: Mapping[str, Field] = field(default_factory=dict)  # all that its run says, for conditions
    ran: bool = True  # a model, in the process that the fields are of


def read(path: Path) -> Lock:
    """Read a lock.

    Raises BadFile where it is missing, is not one, or is not as it was written.
    """
    if not path.is_file():
        raise BadFile(f"there is no lock at {path}. `provenance lock` writes one.")
    try:
        form = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadFile(f"{path} is not a lock, or is cut: {error}. `provenance lock` writes one.") from None
    about = form.get("lock")
    if not isinstance(about, dict) or "format" not in about:
        raise BadFile(f"{path} is not a lock: it has no table [lock] with a format. `provenance lock` writes one.")
    if about["format"] != FORMAT:
        raise BadFile(f"{path} has format {about['format']!r}; this version reads {FORMAT}. Write it again.")
    _as_written(path, form)
    fields = {name: Field(name, _untoml(value)) for effect in ACTING for name, value in form.get(effect, {}).items()}
    fields |= {name: Field.unknown(name, why) for name, why in form.get("open", {}).items()}
    unloaded = form.get("unloaded", {}).items()
    fields |= {name: Field.moot(name, why) for why, names in unloaded for name in names}
    return Lock(fields, about, ran=about.get("from") == "run")


def _as_written(path: Path, form: Mapping[str, Any]) -> None:
    """Hold a lock against what it says of itself: a promise that somebody changed promises nothing.

    Raises BadFile.
    """
    again = "Take it from git as it was, or write it again with `provenance lock`"
    try:
        said, found, same = form["lock"].get("fields"), _count(form), form["lock"].get("digest") == _digest(form)
    except (NotCanonical, TypeError, AttributeError):  # a table that is none, a date
        raise BadFile(f"{path} was edited by hand into something that no lock holds. {again}.") from None
    if isinstance(said, int) and found < said:
        raise BadFile(f"{path} is cut: it was written with {said} fields, and holds {found}. {again}.")
    if not same:
        raise BadFile(
            f"{path} was edited by hand: its digest is not that of what it says. {again}; --allow and --vary let a "
            "field differ."
        )


def diff(one: Lock, other: Lock, allow: Iterable[str] = (), vary: Iterable[str] = ()) -> Comparison:
    """Compare two sides. A side that ran no model is asked what it would be under the model of the other.

    A lock holds what had a value. What it does not hold, and would have held, was unset when it was written, if the
    same catalogue wrote it; what it would not have held is not compared.
    """
    a, b = one.around or one.fields, other.around or other.fields
    around = (a if one.ran and not one.about else {**b, **a}, b if other.ran and not other.about else {**a, **b})
    before, now = _filled(one, other, around[0]), _filled(other, one, around[1])
    new = now.keys() - before.keys() if one.about else set()
    gone = before.keys() - now.keys() if other.about else set()
    found = compare(
        {name: item for name, item in before.items() if name not in gone},
        {name: item for name, item in now.items() if name not in new},
        allow, vary, around, (not one.ran, not other.ran),
    )  # fmt: skip
    found.note = _note(one.about, other.about)
    found.open += _beyond(one, now, new, _run(around[1]), "A") + _beyond(other, before, gone, _run(around[0]), "B")
    # What a lock could not read was no promise, and it says so itself; but weights that nobody can read may be others.
    open_then = {
        name
        for side in (one, other) if side.about
        for name, item in side.fields.items() if not item.known and UNREAD not in item.reason
    }  # fmt: skip
    found.blind = [gap for gap in found.blind if gap.name not in open_then]
    if found.note:
        strange = [gap for gap in found.blind if spec(gap.name).group == "other"]
        found.blind = [gap for gap in found.blind if gap not in strange]
        found.open += strange
    return found


def _note(*sides: Mapping[str, Any]) -> str:
    """Say that a lock was written by another field catalogue: it may know fields that this one does not."""
    versions = [side["catalogue"] for side in sides if side and side["catalogue"] != VERSION]
    if not versions:
        return ""
    return (
        f"the lock was written with version {versions[0]} of the field catalogue, and this is version {VERSION}: only "
        "what both know is compared; `provenance lock` writes it anew."
    )


def _filled(held: Lock, other: Lock, around: Mapping[str, Field]) -> dict[str, Field]:
    """Return the fields of a side; of a lock with those that it does not hold because they were unset."""
    fields, run = dict(held.fields), _run(around)
    parts = {part(name) for name in fields}
    if not held.ran and other.ran:
        parts &= {"process"}  # it may hold a checkpoint, and not what becomes of one in memory
    # Of its model a lock keeps what acts, so it cannot always say itself whether it would have held a field.
    unsure = held.ran and not other.ran
    if held.about.get("catalogue") != VERSION:
        return fields
    for name, item in other.fields.items():
        would = _acts(name, run) and (not unsure or conditions.active(spec(name).active_when, run))
        if name not in fields and item.state is State.VALUE and part(name) in parts and would:
            fields[name] = Field.unset(name)
    return fields


def _beyond(lock: Lock, other: Mapping[str, Field], names: Iterable[str], run: Run, side: str) -> list[explained.Blind]:
    """Return what acts on the other side of a lock, and could not when the lock was written, or was not known to it."""
    parts = {part(name) for name in lock.fields}
    telling = (name for name in sorted(names) if other[name].state is State.VALUE and part(name) in parts)
    return [explained.Blind(name, f"not held in {side}") for name in telling if _acts(name, run)]
