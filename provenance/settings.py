"""One frozen `Settings`, from arguments, PROVENANCE_ variables and a TOML file, in that order of strength.

Each setting is declared once, with its help; the variables, the TOML keys and ``docs/settings.md`` come from
here. Settings are read at three doors only (recorder, cli, web); all other rooms take plain arguments.
"""

import dataclasses
import hashlib
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance.errors import BadSetting

GRACE = 86_400.0
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
YES, NO = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def _setting(default: object, text: str, *choices: str, least: int = 0, most: int = 32) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set. The variable of ``db`` is PROVENANCE_DB, and so on."""

    db: str = _setting("", "Database: a path, or a URL (sqlite:///…, postgresql+psycopg://…). "
                           "Default: provenance/provenance.db under the user's data directory.")  # fmt: skip
    spool: str = _setting("", "Folder of the journal. Default: beside a SQLite file, else under the state directory.")
    key_file: str = _setting("", "File of the store's key (32 bytes, mode 0600). Default: provenance/key under the "
                                 "user's configuration directory; made on first use.")  # fmt: skip
    capture: str = _setting("full", "What is kept of prompts and outputs: everything, salted digests, or nothing.",
                            "full", "digest", "off")  # fmt: skip
    evidence: int = _setting(4, "Top logits kept per generated token; 0 turns token evidence off.")
    weights: str = _setting("tensors", "What is hashed in the background: tensors in memory and then the "
                            "checkpoint's files, the files alone, or nothing.", "tensors", "files", "off")  # fmt: skip
    writer: str = _setting("process", "Who moves the journal into the database: a child process, a thread of this "
                           "process, or somebody else.", "process", "thread", "off")  # fmt: skip
    durability: str = _setting("process", "What an acknowledged record survives: the death of the process; a power "
                               "loss too (`power`: the device has it); with `database` the store has committed it; "
                               "`memory` may lose what a ring holds. What each costs: docs/durability.md.",
                               "process", "power", "database", "memory")  # fmt: skip
    on_failure: str = _setting("count", "What a call does whose record cannot be kept: it runs and the loss is "
                               "counted; it waits up to max_block seconds first; or it fails before the model runs.",
                               "count", "block", "raise")  # fmt: skip
    max_block: float = _setting(5.0, "Seconds that a call waits at most: for room with on_failure=block, for the "
                                "commit with durability=database. No other call waits.", most=3600)  # fmt: skip
    spool_max: int = _setting(0, "Bytes that the spool may hold, as in 512M or 2G; what comes beyond is dropped and "
                              "named. 0: a gibibyte, or 5 % of what is free if that is less.",
                              least=1 << 20, most=1 << 50)  # fmt: skip
    sync_interval: float = _setting(0.5, "Seconds between flushes in the background, with durability=process: what a "
                                    "power loss may cost. 0 leaves them to the system.", most=3600)  # fmt: skip
    max_payload: int = _setting(1024, "MiB that one payload may have (a prompt, an image, a tensor): of a larger one "
                                "only digests of all its bytes are kept, and the mark that it was cut. Beyond 1 MiB "
                                "a payload is a file or rows of its own.", most=1 << 20)  # fmt: skip
    grace: int = _setting(24, "Hours that the writer keeps a drained segment, so that `provenance redrain` can bring "
                          "back what a restored or failed-over database lost; 0: none. All of them take at most 1 GiB, "
                          "and a twentieth of what is free.", most=24 * 365)  # fmt: skip
    identify_host: bool = _setting(False, "Record the host's name in clear instead of a keyed digest of it.")  # noqa: FBT003
    disabled: bool = _setting(False, "Turn everything off: calls run as if nothing were installed.")  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie, resolved from settings."""

    url: str
    database: Path | None  # the file of an embedded store
    spool: Path
    key_file: Path
    grace: float = GRACE  # seconds that drained segments are kept


def load(arguments: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. An argument of None counts as not given.

    Raises BadSetting for an unknown name or a value that cannot be used.

    >>> found = load({"evidence": 8}, {"PROVENANCE_CAPTURE": "digest", "PROVENANCE_SPOOL_MAX": "2G"})
    >>> found.evidence, found.capture, found.spool_max, found.writer
    (8, 'digest', 2147483648, 'process')
    """
    environ = os.environ if environ is None else environ
    chosen: dict[str, object] = {}
    for name, value in _toml(environ).items():
        chosen[name] = _value(name, value, "the settings file")
    for item in dataclasses.fields(Settings):
        variable = f"PROVENANCE_{item.name.upper()}"
        if variable in environ:
            chosen[item.name] = _value(item.name, environ[variable], variable)
    for name, value in (arguments or {}).items():
        if value is not None:
            chosen[name] = _value(name, value, f"the argument {name}")
    return Settings(**chosen)  # type: ignore[arg-type]


def places(settings: Settings, environ: Mapping[str, str] | None = None) -> Places:
    """Resolve where the database, the spool and the key lie. Nothing is made or opened.

    Raises BadSetting for a URL that names no database we can use.
    """
    environ = os.environ if environ is None else environ
    key = _path(settings.key_file) if settings.key_file else config_home(environ) / "provenance" / "key"
    database = embedded(settings.db) if settings.db else data_home(environ) / "provenance" / "provenance.db"
    if database is not None and not database.name:
        raise BadSetting(f"the database {database} is a folder; name a file in it.")
    if settings.spool:
        spool = _path(settings.spool)
    elif database is not None:
        spool = database.with_name(database.name + ".spool")
    else:
        name = hashlib.sha256(settings.db.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        spool = state_home(environ) / "provenance" / f"spool-{name}"
    url = f"sqlite:///{database}" if database is not None else settings.db
    return Places(url, database, spool, key.absolute(), settings.grace * 3600.0)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise BadSetting(f"the path {text} cannot be resolved: {error}") from None


def embedded(text: str) -> Path | None:
    """Return the file of a SQLite path or URL, or None for a server.

    Raises BadSetting for anything else.
    """
    scheme, mark, rest = text.partition("://")
    if not mark:
        return _path(text)
    if scheme in ("sqlite", "sqlite+pysqlite"):
        if not rest.startswith("/") or rest in ("", "/", "/:memory:"):
            raise BadSetting(
                f"the database URL {hide(text)} names no file; write sqlite:///relative.db or sqlite:////absolute.db."
            )
        return Path(rest[1:]).absolute()
    if scheme in ("postgresql", "postgresql+psycopg", "postgres"):
        return None
    raise BadSetting(
        f"the database URL {hide(text)} starts with {scheme!r}; use a path, sqlite:///… or postgresql+psycopg://…."
    )


def hide(url: str) -> str:
    """Return a URL without its password.

    >>> hide("postgresql://me:secret@host/db")
    'postgresql://me:***@host/db'
    """
    head, at, tail = url.rpartition("@")
    if not at:
        return url
    scheme, mark, login = head.partition("://")
    user, colon, _ = login.partition(":")
    return f"{scheme}{mark}{user}{':***' if colon else ''}@{tail}"


def data_home(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's data."""
    return _home(environ, "XDG_DATA_HOME", ".local/share")


def state_home(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's state."""
    return _home(environ, "XDG_STATE_HOME", ".local/state")


def config_home(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's configuration."""
    return _home(environ, "XDG_CONFIG_HOME", ".config")


def cache_home(environ: Mapping[str, str]) -> Path:
    """Return the directory of the user's caches."""
    return _home(environ, "XDG_CACHE_HOME", ".cache")


def remembered_digests() -> Path:
    """Return the file in which digests of files are remembered."""
    return cache_home(os.environ) / "provenance" / "digests"


def _home(environ: Mapping[str, str], variable: str, default: str) -> Path:
    value = environ.get(variable, "")
    if value.startswith("/"):
        return Path(value)
    home = _user_home(environ)
    if sys.platform == "darwin":
        return home / "Library" / ("Caches" if "CACHE" in variable else "Application Support")
    return home / default


def _user_home(environ: Mapping[str, str]) -> Path:
    named = environ.get("HOME", "")
    if homeless(environ):
        import pwd

        try:
            return Path(pwd.getpwuid(os.geteuid()).pw_dir)
        except KeyError:
            return Path(named)
    return Path(named or Path.home())


def homeless(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether HOME names something that is there and is no folder, as services set it to /dev/null.

    The home of the account is used instead.
    """
    named = (os.environ if environ is None else environ).get("HOME", "")
    return bool(named) and sys.platform != "win32" and os.path.exists(named) and not os.path.isdir(named)


def _toml(environ: Mapping[str, str]) -> dict[str, object]:
    named = environ.get("PROVENANCE_CONFIG", "")
    path = _path(named) if named else config_home(environ) / "provenance" / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named:
            raise BadSetting(f"PROVENANCE_CONFIG names {path}, which does not exist.") from None
        return {}
    except NotADirectoryError as error:
        if named:
            raise BadSetting(f"the settings file {path} cannot be read: {error.strerror}.") from None
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(f"the settings file {path} cannot be read: {error}.") from None


def _value(name: str, value: object, origin: str) -> object:
    """Bring one value to the type of its setting, or say what is wrong with it."""
    known = {item.name: item for item in dataclasses.fields(Settings)}
    if name not in known:
        raise BadSetting(f"{origin} sets {name!r}, which is no setting; there are {', '.join(known)}.")
    item = known[name]
    if isinstance(item.default, bool):
        text = str(value).strip().lower()
        if text not in YES | NO:
            raise BadSetting(f"{origin} is {value!r}; write 1 or 0.")
        return text in YES
    if isinstance(item.default, (int, float)):
        return _number(value, item, origin)
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    choices = item.metadata["choices"]
    if choices and text not in choices:
        raise BadSetting(f"{origin} is {text!r}; write one of {', '.join(choices)}.")
    return text


def _number(value: object, item: "dataclasses.Field[Any]", origin: str) -> int | float:
    """Read a number within the bounds of its setting; 0 is what a setting takes for none. Bytes may have a unit."""
    least, most = item.metadata["least"], item.metadata["most"]
    text = str(value).strip().lower()
    try:
        if isinstance(item.default, float):
            number: int | float = float(text)
        elif least:
            size = text.removesuffix("b").removesuffix("i")
            number = int(size[:-1]) * UNITS[size[-1]] if size[-1:] in UNITS else int(size)
        else:
            number = int(text)
    except ValueError:
        number = -1
    if number == 0 or least <= number <= most:
        return number
    range_ = f"0, or bytes from {least >> 20}M" if least else f"a number from 0 to {most}"
    raise BadSetting(f"{origin} is {value!r}; write {range_}.")
