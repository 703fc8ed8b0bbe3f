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
from provenance.errors import BadFile, BadSetting
from provenance.explain import conditions
from provenance.explain import fields as explained
from provenance.explain.rules import PARENTS
from provenance.facts import Field, Run, State
from provenance.integrity.canonical import plain, restore

FORMAT = 1
ACTING = ("semantic", "numeric", "random")
HEAD = """\
# What the outputs of this program rest on, written by `provenance lock`; compare with `provenance check`.
# semantic: another value computes another function. numeric: the same function with other rounding.
# random: another stream of random numbers. open: could not be read here, with the reason.
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
    varied: list[str] = field(default_factory=list)
    equal: int = 0

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
) -> Comparison:
    """Compare two tables of fields; ``allow`` and ``vary`` are names or patterns such as ``gpu.*``.

    ``around`` is what conditions ask of the two sides, where the tables hold only a part of them.

    Raises BadSetting for a name that no field has.
    """
    allowed, varied = patterns(allow, {*before, *now}), patterns(vary, {*before, *now})
    differing, blind = explained.compare(before, now)
    one, other = around or (before, now)
    runs = _run(one), _run(other)
    found = Comparison(equal=len(before.keys() & now.keys()))
    for item in differing:
        found.equal -= 1
        declared = spec(item.name)
        if matches(item.name, varied):
            found.varied.append(item.name)
            continue
        change = Change(item.name, declared.effect, item.a, item.b, matches(item.name, allowed))
        acts = (
            declared.effect in ACTING and item.name not in PARENTS and not conditions.moot(declared.active_when, *runs)
        )
        (found.changed if acts else found.context).append(change)
    for gap in blind:
        found.equal -= gap.name in before and gap.name in now
        declared = spec(gap.name)
        decides = (
            declared.effect in ACTING and gap.name not in PARENTS and not conditions.moot(declared.active_when, *runs)
        )
        if decides and not matches(gap.name, [*allowed, *varied]):
            found.blind.append(gap)
    found.changed.sort(key=lambda item: (ACTING.index(item.effect), -spec(item.name).prior, item.name))
    return found


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
    parts: dict[str, dict[str, Any]] = {effect: {} for effect in (*ACTING, "open")}
    for name, item in sorted(fields.items()):
        declared = spec(name)
        moot = declared.effect not in ACTING or name in PARENTS
        if (moot or conditions.active(declared.active_when, run) is False) and not keep_all:
            continue
        if item.state is State.VALUE:
            parts[declared.effect if declared.effect in ACTING else "semantic"][name] = _toml(item.value)
        elif not item.known:
            parts["open"][name] = f"{item.state.value}: {item.reason}" if item.reason else item.state.value
    document = {"lock": {"format": FORMAT, "catalogue": VERSION, **about}, **{k: v for k, v in parts.items() if v}}
    return HEAD + "\n" + tomli_w.dumps(document)


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
    """A lock as read: its fields, and what it says of itself."""

    fields: Mapping[str, Field]
    about: Mapping[str, Any]


def read(path: Path) -> Lock:
    """Read a lock.

    Raises BadFile where it is missing or is not one.
    """
    if not path.is_file():
        raise BadFile(f"there is no lock at {path}. `provenance lock` writes one.")
    try:
        form = tomllib.loads(path.read_text(encoding="utf-8"))
        about = form["lock"]
        if about["format"] != FORMAT:
            raise BadFile(f"{path} has format {about['format']!r}; this version reads {FORMAT}. Write it again.")
        fields = {
            name: Field(name, _untoml(value)) for effect in ACTING for name, value in form.get(effect, {}).items()
        }
        fields |= {name: Field.unknown(name, str(why)) for name, why in form.get("open", {}).items()}
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise BadFile(f"{path} is not a lock: {error}. `provenance lock` writes one.") from error
    return Lock(fields, about)


def check(lock: Lock, now: Mapping[str, Field], allow: Iterable[str] = (), vary: Iterable[str] = ()) -> Comparison:
    """Compare a lock with the fields of now.

    A lock holds what had a value. What it does not hold was unset when it was written, if the same catalogue wrote it;
    by another catalogue it may not have been known, and is left out.
    """
    before = dict(lock.fields)
    parts = {part(name) for name in before}
    if lock.about.get("catalogue") == VERSION:
        for name, item in now.items():
            if name not in before and item.state is State.VALUE and part(name) in parts:
                before[name] = Field.unset(name)
    seen = {name: item for name, item in now.items() if name in before}
    found = compare(before, seen, allow, vary, ({**now, **lock.fields}, now))
    # What neither side could read was no promise: the lock says so itself.
    open_then = {name for name, item in lock.fields.items() if not item.known}
    found.blind = [gap for gap in found.blind if gap.name not in open_then]
    return found
