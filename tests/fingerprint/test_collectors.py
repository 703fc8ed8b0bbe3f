"""Collectors of other packages: really installed ones, asked once, each on its own, never stronger than our own readers."""

import sys
from pathlib import Path
from typing import Any

import pytest

from provenance.facts import State
from provenance.fingerprint import environment
from provenance.fingerprint.environment import Environment

MODULE = """
import threading
calls = []
def good():
    calls.append(1)
    return {"rack.row": 7, "rack.deep": {"a": [1.5, None]}, "rack.odd": object(), "rack.nothing": None}
def fields():
    from provenance.facts import Field
    return [Field("rack.field", 1), Field.unknown("rack.lost", "the rack is dark")]
def thief(): return {"gpu.0.name": "mine", "env.HOME": "/x", "NO": 1, "engine.replica": "b"}
def secret(): return {"rack.login": "https://me:password@host"}
def large(): return {"rack.large": "x" * 20000}
def wrong(): return 5
def fails(): raise OSError("no such rack")
def leaves(): raise SystemExit(1)
def hangs(): threading.Event().wait()
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a distribution with collectors into a folder on the path."""

    def install(*names: str, extra: str = "") -> None:
        info = tmp_path / "site" / "racks-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: racks\nVersion: 1.0\n")
        lines = [f"{name} = racks_collectors:{name}" for name in names]
        (info / "entry_points.txt").write_text("[provenance.collectors]\n" + "\n".join([*lines, extra]) + "\n")
        (tmp_path / "site" / "racks_collectors.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    yield install
    sys.modules.pop("racks_collectors", None)


def test_what_a_collector_returns_is_in_the_environment_and_it_is_asked_once(install: Any) -> None:
    install("good", "fields")
    reader = Environment()
    fields = reader.environment().fields
    assert (fields["rack.row"].value, fields["rack.row"].source) == (7, "collector.good")
    assert fields["rack.deep"].value == {"a": [1.5, None]}
    assert fields["rack.odd"].value == {"type": "builtins.object"}
    assert fields["rack.nothing"].state is State.UNSET
    assert (fields["rack.field"].value, fields["rack.lost"].reason) == (1, "the rack is dark")
    assert not any(name.startswith("collector.") for name in fields)
    reader._environment = None
    reader.environment()
    Environment(reader).environment()  # a forked child
    assert sys.modules["racks_collectors"].calls == [1]


def test_a_collector_overrides_nothing_of_ours(install: Any) -> None:
    install("thief")
    fields = Environment().environment().fields
    assert all(item.value != "mine" for item in fields.values())
    assert fields["engine.replica"].value == "b"  # for others to fill
    refused = fields["collector.thief"]
    assert refused.state is State.UNKNOWN
    assert "gpu.0.name: it is read by provenance itself" in refused.reason


@pytest.mark.parametrize(
    ("name", "field", "reason"),
    [
        ("fails", "collector.fails", "OSError: no such rack"),
        ("leaves", "collector.leaves", "RuntimeError: it raised SystemExit"),
        ("wrong", "collector.wrong", "TypeError: it returned a int, not a mapping or a list of Field"),
        ("missing", "collector.missing", "AttributeError"),
        ("large", "rack.large", "its value takes 20002 bytes, more than 16384"),
        ("secret", "rack.login", "the value looks like a credential"),
    ],
)
def test_one_that_fails_says_why(install: Any, name: str, field: str, reason: str) -> None:
    install("good", name)
    fields = Environment().environment().fields
    assert fields[field].reason.startswith(reason)
    assert not fields[field].known
    assert fields["rack.row"].value == 7


def test_one_that_hangs_is_left_behind(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "SECONDS", 0.2)
    install("hangs", "good")
    fields = Environment().environment().fields
    assert fields["collector.hangs"].reason == "the collector hangs did not answer within 0.2 s"
    assert fields["rack.row"].value == 7


def test_metadata_that_nobody_can_read_is_one_unknown_field(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(group: str) -> list[Any]:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, group)

    monkeypatch.setattr(environment, "entry_points", broken)
    (field,) = environment.collected()
    assert (field.name, field.state) == ("collector.all", State.UNKNOWN)
