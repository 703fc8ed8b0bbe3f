"""Reading fields: each reader on its own, so that one that fails costs one field and gives its reason.

A reader is a function without arguments that returns the value, or None for "nobody set it". It raises `Moot`
where the field has no meaning here; any other exception becomes an unknown field. A reader asks ``sys.modules``
and never imports a framework, never initialises a device.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from provenance.facts import Field, State
from provenance.integrity.secrets import scrub, tells, withheld

Reader = Callable[[], object]
REASON_CHARS = 160
COMMON_NAMES = {"root", "user", "admin", "app", "home", "nobody", "ubuntu", "debian", "runner", "jovyan", "service",
                "model", "models", "data", "python", "worker", "jenkins", "docker", "ec2-user", "vscode"}  # fmt: skip


class Moot(Exception):
    """The field has no meaning on this machine or in this process."""


class Missing(Exception):
    """The field exists and cannot be read here."""


def read(name: str, reader: Reader, source: str = "") -> Field:
    """Read one field. Never raises."""
    try:
        value = reader()
    except Moot as why:
        return Field.moot(name, str(why))
    except Missing as why:
        return Field.unknown(name, str(why))
    except AttributeError as error:
        return Field.unknown(name, f"absent in this version: {_said(error, named=False)}"[:REASON_CHARS])
    except Exception as error:
        return Field.unknown(name, _said(error))
    if isinstance(value, Field):
        return value
    if value is None:
        return Field(name, None, State.UNSET, "", source)
    if withheld(name, value) or (isinstance(value, str) and tells(value)):
        return Field.secret(name, source)
    return Field(name, value, State.VALUE, "", source)


def _said(error: Exception, named: bool = True) -> str:
    """Return what an exception says, without secrets that it may quote."""
    return reason(f"{type(error).__name__}: {error}" if named else str(error))


def reason(text: str) -> str:
    """Return a reason as it may be written: without secrets that it may quote, and not long."""
    return scrub(text.encode("utf-8", "backslashreplace")).decode("utf-8", "replace")[:REASON_CHARS]


def read_all(readers: Mapping[str, Reader], source: str = "") -> list[Field]:
    """Read a table of fields."""
    return [read(name, reader, source) for name, reader in readers.items()]


def within(seconds: float, name: str, work: Callable[[], list[Field]], names: Iterable[str]) -> list[Field]:
    """Run a collector that may hang in a thread of its own; late is unknown, with that reason.

    The thread is left behind: nothing can stop a driver call. It writes to nobody.
    """
    found: list[Field] = []
    failed: list[str] = []

    def run() -> None:
        try:
            found.extend(work())
        except Exception as error:
            failed.append(_said(error))

    thread = threading.Thread(target=run, name=f"provenance-{name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return [Field.unknown(item, f"{name} did not answer within {seconds:g} s") for item in names]
    if failed:
        return [Field.unknown(item, failed[0]) for item in names]
    return found


def module(name: str) -> Any:
    """Return a module that the process has loaded, without loading it.

    Raises Missing where it has not.
    """
    found = sys.modules.get(name)
    if found is None:
        raise Missing(f"{name} is not loaded")
    return found


def short_path(path: str, home: str) -> str:
    """Return a path with the user's home cut off.

    >>> short_path("/home/ann/models/x", "/home/ann")
    '~/models/x'
    """
    return "~" + path[len(home) :] if home not in ("", "/") and (path + "/").startswith(home + "/") else path


def unnamed(text: str, home: str, users: Iterable[str]) -> str:
    """Return paths without the home and the name of a user, wherever they stand in a value.

    >>> unnamed("/home/ann/lib:/opt/lib:/tmp/torchinductor_ann", "/home/ann", ["ann"])
    '~/lib:/opt/lib:/tmp/torchinductor_[user]'
    """
    if "/" not in text:
        return text
    if home not in ("", "/"):
        text = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?=[/:;,\s\"']|$)", "~", text)
    for user in users:
        text = re.sub(rf"(?<=[/_.-]){re.escape(user)}(?=[/:;,_.\s\"'-]|$)", "[user]", text)
    return text


def users(environ: Mapping[str, str]) -> list[str]:
    """Return what the user of this process is called; names that many have say nothing and are left out."""
    names = {environ.get("USER", ""), environ.get("LOGNAME", ""), os.path.basename(environ.get("HOME", ""))}
    try:
        import pwd

        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except (ImportError, KeyError):  # a user whom the system does not know, in a container
        pass
    return sorted(name for name in names if len(name) > 2 and name.lower() not in COMMON_NAMES)
