"""Every exception of this package, one tree, drawn once.

    ProvenanceError
    ├── UsageError (ValueError)            a person asked for something that cannot be
    │   ├── RunNotFound (LookupError)      no run, or more than one, fits a reference
    │   ├── AmbiguousRows                  two runs whose sequences cannot be paired
    │   ├── BadSetting                     an argument, a variable or a TOML key
    │   ├── BadField                       a field of the caller's own
    │   ├── BadFile                        an export or a segment that is not one
    │   └── WriteRefused                   SQL that would change the store
    ├── CouldNotTell                       what was asked was not recorded, with the reason
    ├── StoreError                         the database
    │   ├── NoDatabase (FileNotFoundError)
    │   │   └── StoreAway                  a server that does not answer now
    │   ├── SchemaMismatch                 older or newer than this code
    │   └── KeyMismatch                    the key file is not this store's
    ├── JournalError                       the spool
    │   ├── NotYet                         a record that is kept, but not at the level asked for
    │   ├── SpoolRefused                   a folder or file that is not safe to write to
    │   └── BadSegment                     a header that is foreign, newer or damaged
    │       └── MissingBlob                a large payload that does not lie beside its segment
    ├── IntegrityError
    │   └── NotCanonical (TypeError)       a value that has no canonical bytes
    ├── NotRecorded (RuntimeError)         a call that must not run because it cannot be recorded
    ├── NotDeterministic (RuntimeError)    an operator that has no deterministic form, under strict
    └── MissingExtra (ImportError)         an optional dependency, with the line that installs it

A message is one sentence or two: what happened, to which value, what to do next.
The command line prints it and ends with `exit_code`.
"""

from collections.abc import Sequence


class ProvenanceError(Exception):
    """The root of the tree."""

    exit_code = 2


class UsageError(ProvenanceError, ValueError):
    """A person asked for something that cannot be."""


class RunNotFound(UsageError, LookupError):
    """No run, or more than one, fits a reference.

    >>> print(RunNotFound("9f3", ["9f31c0", "9f3a77"]))
    run '9f3' is ambiguous: it begins 9f31c0 and 9f3a77. Give more of its letters.
    >>> print(RunNotFound("abc", []))
    no run begins with 'abc'. `provenance log` lists the last 20.
    """

    def __init__(self, reference: str, candidates: Sequence[str]) -> None:
        self.reference = reference
        self.candidates = tuple(candidates)
        if candidates:
            shown = " and ".join(self.candidates[:3]) + (" and others" if len(self.candidates) > 3 else "")
            text = f"run {reference!r} is ambiguous: it begins {shown}. Give more of its letters."
        else:
            text = f"no run begins with {reference!r}. `provenance log` lists the last 20."
        super().__init__(text)


class AmbiguousRows(UsageError):
    """Two runs whose sequences cannot be paired without a word from the caller."""


class BadSetting(UsageError):
    """An argument, a PROVENANCE_ variable or a TOML key that cannot be used."""


class BadField(UsageError):
    """A field of the caller's own whose name or value cannot be kept."""


class BadFile(UsageError):
    """A file that should be an export, a segment or a database, and is not."""


class WriteRefused(UsageError):
    """SQL that would change the store."""


class CouldNotTell(ProvenanceError):
    """What was asked cannot be told from what was recorded."""

    exit_code = 3


class StoreError(ProvenanceError):
    """The database cannot do what was asked."""


class NoDatabase(StoreError, FileNotFoundError):
    """There is no database where one was looked for."""


class StoreAway(NoDatabase):
    """A server does not answer: it is down, starting or full. It may come back, and whoever writes tries again."""


class SchemaMismatch(StoreError):
    """The database's schema is older or newer than this code."""


class KeyMismatch(StoreError):
    """The key file is not the one this store was written with."""


class JournalError(ProvenanceError):
    """The spool cannot do what was asked."""


class NotYet(JournalError):
    """A record that stands in the spool, while the device or the database that was to have it has not said so."""

    def __init__(self, seq: int, text: str) -> None:
        self.seq = seq
        super().__init__(text)


class SpoolRefused(JournalError):
    """A folder or file that is not safe to write to."""


class BadSegment(JournalError):
    """A segment whose header is foreign, newer than this code, or damaged."""


class MissingBlob(BadSegment):
    """A large payload that does not lie beside its segment, or is not of its size."""


class IntegrityError(ProvenanceError):
    """Bytes that are hashed or signed are not what they must be."""


class NotCanonical(IntegrityError, TypeError):
    """A value that has no canonical bytes."""


class NotRecorded(ProvenanceError, RuntimeError):
    """A call cannot be recorded, and ``on_failure="raise"`` says that none runs unrecorded.

    >>> print(NotRecorded("No space left on device"))
    this call cannot be recorded, so the model was not run (on_failure is "raise"): No space left on device
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f'this call cannot be recorded, so the model was not run (on_failure is "raise"): {reason}')


class NotDeterministic(ProvenanceError, RuntimeError):
    """An operator without a deterministic form was used where one was demanded.

    >>> print(NotDeterministic("put_"))
    put_ has no deterministic form here. Use another operator, or provenance.deterministic() without strict: it warns.
    """

    def __init__(self, operator: str) -> None:
        self.operator = operator
        super().__init__(
            f"{operator} has no deterministic form here. Use another operator, or provenance.deterministic() without "
            "strict: it warns."
        )


class MissingExtra(ProvenanceError, ImportError):
    """An optional dependency is not installed.

    >>> print(MissingExtra("transformers", "the demo", "demo"))
    the demo needs transformers, which is not installed. Run: pip install 'inference-provenance[demo]'
    """

    def __init__(self, package: str, what: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed. Run: pip install 'inference-provenance[{extra}]'"
        )
