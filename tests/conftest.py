"""What every test gets: a home of its own, so that nothing of the machine's leaks in and nothing leaks out."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes import records

if TYPE_CHECKING:
    from tests.fakes.postgres import Server

ROOT = Path(__file__).parents[1]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give the test a home, a store and a key of its own, and end its recorder afterwards."""
    for name in list(os.environ):
        if name.startswith(("PROVENANCE_", "XDG_")):
            monkeypatch.delenv(name)
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("PROVENANCE_DB", str(tmp_path / "store" / "p.db"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield place
    recorder = sys.modules.get("provenance.recorder")
    if recorder is not None:
        _reset(recorder)


def _reset(recorder: Any) -> None:
    """Forget the process's recorder: the next test opens its own."""
    wrap = sys.modules.get("provenance.capture.wrap")
    if wrap is not None:
        wrap.uninstrument()
    opened = recorder._state["recorder"]
    if opened is not None:
        opened.close()
        if opened._writer is not None:
            opened._writer.terminate()
            opened._writer.wait(10)
    recorder._state.update(recorder=None, settings=None, parent=None, refused="")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Return the path of the test's store."""
    return tmp_path / "store" / "p.db"


@pytest.fixture
def command() -> Command:
    """Run `provenance` in a process of its own, as a user does."""

    def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "provenance", *arguments],
            capture_output=True, text=True, timeout=120, check=False, **options,
        )  # fmt: skip

    return run


@pytest.fixture
def python() -> Command:
    """Run a Python program in a process of its own."""

    def run(code: str, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True, text=True, timeout=120, check=False, **options,
        )  # fmt: skip

    return run


# -- PostgreSQL ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def server() -> "Iterator[Server]":
    """Return a PostgreSQL server, one for all tests of this worker."""
    from tests.fakes.postgres import Server

    made = Server("fsync=off", "autovacuum=off")
    yield made
    made.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test on both databases: every store that it makes is of this kind."""
    if request.param == "postgresql":
        monkeypatch.setattr(records, "fresh_url", [request.getfixturevalue("server").fresh])
    return str(request.param)
