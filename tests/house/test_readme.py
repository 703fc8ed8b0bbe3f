"""The README: short, and every line of SQL and every command in it really there."""

import re
from pathlib import Path

import pytest

import provenance
from provenance.cli.main import COMMANDS
from tests.conftest import Command

ROOT = Path(provenance.__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_at_most_150_lines_and_leads_with_the_problem() -> None:
    assert len(README.splitlines()) <= 150
    assert README.index("two answers") < README.index("says why") < README.index("scripts/demo")


def test_every_command_that_it_names_exists() -> None:
    for name in re.findall(r"^provenance (\w+)|`provenance (\w+)", README, re.MULTILINE):
        assert (name[0] or name[1]) in COMMANDS


def test_no_page_names_a_command_that_does_not_exist() -> None:
    for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md"), ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"`provenance (\w+)", page.read_text(encoding="utf-8")):
            assert name in COMMANDS, (page.name, name)


def test_every_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


def test_its_sql_runs(command: Command, db: Path) -> None:
    provenance.init(db=db, writer="off")

    @provenance.record
    def f(x: int) -> int:
        return x

    f(1)
    blocks = re.findall(r"```sql\n(.*?)```", README, re.DOTALL)
    statements = [part for block in blocks for part in re.sub(r"--.*", "", block).split(";") if part.strip()]
    assert len(statements) >= 3
    for statement in statements:
        found = command("sql", " ".join(statement.split()))
        assert found.returncode == 0, (statement, found.stderr)


@pytest.mark.parametrize("name", ["init", "wrap", "instrument", "record", "run"])
def test_every_way_in_that_it_names_is_exported(name: str) -> None:
    assert f"provenance.{name}" in README or f"@provenance.{name}" in README
    assert name in provenance.__all__
