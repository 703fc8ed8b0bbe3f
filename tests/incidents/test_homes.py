"""Every deciding fact of the public reports is recorded, or the reason why it cannot be stands beside it."""

import subprocess
import sys

import pytest

from provenance.catalogue.fields import table
from provenance.catalogue.unread import UNREAD
from provenance.explain import compare
from provenance.store import tables
from tests.fakes.runs import run
from tests.incidents import homes

WORDS = sorted({(word, case.runtime) for case in homes.cases() for word in case.deciding})


def test_the_reports_are_whole() -> None:
    assert len(homes.cases()) == 90
    assert len({case.id for case in homes.cases()}) == 90
    assert {case.confidence for case in homes.cases()} == {"stated", "argued", "inferred"}


@pytest.mark.parametrize(("word", "runtime"), WORDS)
def test_every_fact_has_a_line_and_every_home_is_declared(word: str, runtime: str) -> None:
    found = homes.home(word, runtime)
    assert found.field in table() or not found.field
    assert found.field or found.derived or found.note, "what has no home says why"
    if found.how == homes.CALLER:
        assert found.note, "what only the caller can know says why"


def test_no_line_is_there_for_nothing() -> None:
    used = {word for word, _ in WORDS}
    assert {word for word, _ in homes.rows()} == used


def test_derived_things_are_really_there() -> None:
    answer = compare.compare(run([[5, 6]]), run([[5, 7]]))
    names = {home.derived for word, runtime in WORDS if (home := homes.home(word, runtime)).derived}
    assert names
    for name in names:
        if name in tables.metadata.tables:
            continue
        here: object = answer
        for part in name.split("."):
            if part != "sequences":
                assert isinstance(here, dict)
                assert part in here, name
                here = here[part]


def test_the_shares_hold() -> None:
    found = homes.shares()
    assert found.facts >= 320
    assert found.homed / found.facts >= 0.95
    assert found.firsts_homed / found.firsts >= 0.98
    assert found.collected / found.facts >= 0.80
    assert found.firsts_collected / found.firsts >= 0.80


def test_a_field_that_nobody_reads_is_not_called_collected() -> None:
    assert homes.read_by("torch.num_threads") == "provenance/fingerprint/flags.py"
    assert homes.read_by("gpu.N.name") == "provenance/fingerprint/gpu.py"
    assert homes.read_by("generation.use_cache") == "provenance/capture/generation.py"
    assert homes.read_by("input.unicode_normal_form") == ""
    with pytest.raises(KeyError, match="no line"):
        homes.home("nobody.ever_heard_of", "vllm")


def test_the_page_is_up_to_date() -> None:
    command = [sys.executable, str(homes.ROOT / "scripts" / "docs"), "--only", "incidents.md", "--check"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_every_declared_field_is_read_or_says_why_not() -> None:
    """Declared and neither read nor listed would be a promise that nobody keeps; listed and read, a stale excuse."""
    declared = table()
    unread = {name for name in declared if not homes.read_by(name) and "SECRET: never read" not in declared[name].help}
    assert unread - set(UNREAD) == set()
    assert {name for name in UNREAD if name in declared and homes.read_by(name)} == set()
    assert set(UNREAD) <= set(declared)
