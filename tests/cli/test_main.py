"""The command line as a whole: help, mistakes, exit codes. A user's mistake is one sentence and never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from provenance.cli import main
from tests.conftest import Command


def test_every_command_is_in_the_overview_with_its_line(command: Command) -> None:
    said = command("--help").stdout
    for name in main.COMMANDS:
        assert f"\n  {name} " in said


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_command_has_help_and_a_page(name: str, command: Command) -> None:
    said = command(name, "--help")
    assert said.returncode == 0
    assert "Usage: provenance " + name in said.stdout
    page = Path(main.__file__).parents[2] / "docs" / "cli.md"
    assert f"## provenance {name}\n" in page.read_text(encoding="utf-8")


def test_the_overview_imports_no_command() -> None:
    code = (
        "import sys; from provenance.cli.main import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('sqlalchemy', 'torch', 'provenance.store.queries')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_no_arguments_show_the_overview(command: Command) -> None:
    assert "Usage: provenance" in command().stdout


def test_the_version_is_told(command: Command) -> None:
    assert command("--version").stdout.startswith("provenance 0.")


def test_shell_completion_can_be_had(command: Command) -> None:
    found = command(
        env={**os.environ, "_PROVENANCE_COMPLETE": "complete_bash", "COMP_WORDS": "provenance di", "COMP_CWORD": "1"}
    )
    assert "diff" in found.stdout
    # The shell is told by the processes above; `:` keeps it there.
    line = f"{sys.executable} -m provenance --show-completion; :"
    script = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False)
    assert "_PROVENANCE_COMPLETE" in script.stdout + script.stderr


def sentence(found: "subprocess.CompletedProcess[str]") -> str:
    """Check that a mistake was answered as promised, and return the sentence."""
    assert found.returncode == 2, found
    assert "Traceback" not in found.stderr + found.stdout
    lines = [line for line in found.stderr.splitlines() if line]
    assert len(lines) == 1, found.stderr
    assert lines[0].startswith("provenance: ")
    return lines[0]


def test_an_unknown_command_is_guessed(command: Command) -> None:
    assert "did you mean 'diff'?" in sentence(command("dif"))
    assert "there are demo" in sentence(command("zzzz"))


def test_a_missing_database_is_one_sentence(command: Command, db: Path) -> None:
    for arguments in (["log"], ["show", "last"], ["sql", "select 1"], ["diff", "last", "last~1"], ["db", "current"]):
        said = sentence(command(*arguments))
        assert str(db) in said
        assert "there is no database" in said


def test_a_folder_where_a_file_should_be(command: Command, tmp_path: Path) -> None:
    for arguments in (["log"], ["db", "upgrade"], ["db", "current"]):
        assert "is a folder and not a database" in sentence(command(*arguments, "--db", str(tmp_path)))
    assert "is a folder and not an exported run" in sentence(command("show", f"{tmp_path}/"))


def test_a_file_that_is_no_database(command: Command, tmp_path: Path) -> None:
    other = tmp_path / "notes.db"
    other.write_text("these are notes, and not a database of any kind" * 20)
    assert "is not a database" in sentence(command("log", "--db", str(other)))
    assert other.read_text().startswith("these are notes")


@pytest.mark.parametrize("url", ["mysql://me:secret@host/db", "sqlite://", "sqlite:///", "nonsense://x"])
def test_a_broken_url_is_one_sentence_without_its_password(url: str, command: Command) -> None:
    said = sentence(command("log", env={**os.environ, "PROVENANCE_DB": url}))
    assert "secret" not in said
    assert "database URL" in said


def test_a_broken_setting_is_one_sentence(command: Command) -> None:
    assert "PROVENANCE_CAPTURE" in sentence(command("log", env={**os.environ, "PROVENANCE_CAPTURE": "some"}))
    assert "PROVENANCE_EVIDENCE" in sentence(command("log", env={**os.environ, "PROVENANCE_EVIDENCE": "many"}))
    assert "does not exist" in sentence(command("log", env={**os.environ, "PROVENANCE_CONFIG": "/no/such.toml"}))


def test_wrong_options_are_one_sentence(command: Command) -> None:
    assert "limit" in sentence(command("log", "--limit", "0"))
    assert "No such option" in sentence(command("log", "--nonsense"))
    assert "diff takes two runs or more and got 1" in sentence(command("diff", "last"))


def test_a_file_that_is_no_export(command: Command, tmp_path: Path) -> None:
    assert "there is no file" in sentence(command("diff", str(tmp_path / "a.json"), "last"))
    for name, content in {"a": "not json", "b": "[1]", "c": '{"schema": "provenance/run/1"}'}.items():
        path = tmp_path / f"{name}.json"
        path.write_text(content)
        assert str(path) in sentence(command("show", str(path)))


def test_a_newer_schema_is_read_only_refused(command: Command, db: Path) -> None:
    assert command("db", "upgrade").returncode == 0
    import sqlite3

    with sqlite3.connect(db) as connection:
        connection.execute("update alembic_version set version_num='9999'")
    connection.close()
    assert "newer than this version knows" in sentence(command("log"))
    assert "newer than this version knows" in sentence(command("db", "upgrade"))


def test_an_internal_error_is_told_apart_from_a_mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> int:
        raise ZeroDivisionError("by us")

    monkeypatch.setattr(main, "_dispatch", broken)
    assert main.main([]) == 70
    assert "internal error: ZeroDivisionError: by us" in capsys.readouterr().err
    monkeypatch.setenv("PROVENANCE_TRACEBACK", "1")
    assert main.main([]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_fine(python: Command) -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'provenance', '--help'], stdout=subprocess.PIPE, stderr=subprocess.PIPE); p.stdout.close(); sys.exit(b'Traceback' in p.stderr.read())"
    assert python(code).returncode == 0


def test_where_things_lie_can_be_asked(command: Command, db: Path) -> None:
    found = json.loads(command("db", "path", "--json").stdout)
    assert {item["what"] if "what" in item else item["kind"] for item in found} == {
        "database", "spool", "key", "digests",
    }  # fmt: skip
    assert str(db) in {item["path"] for item in found}
