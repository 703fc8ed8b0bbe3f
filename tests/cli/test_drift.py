"""drift: over a real store, from the counts that the writer keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text as sql

from provenance.cli.drift import told
from provenance.facts import Field, Fingerprint
from provenance.settings import Places
from provenance.store import database
from provenance.store.drift import Span
from tests.conftest import Command
from tests.fakes.records import WALL, Calls, drained, ids, places, rows, text, written

DAY = 86_400_000_000_000
NEW = Fingerprint.of("environment", [Field("os.name", "linux"), Field("gpu.driver_version", "580")])
OLD = Fingerprint.of("environment", [Field("os.name", "linux"), Field("gpu.driver_version", "570")])


class Traffic:
    """Calls of one process life, at chosen times."""

    def __init__(self, folder: Path) -> None:
        self.spots: Places = places(folder)
        self.calls = Calls(self.spots.spool)
        self.calls.prints()
        for item in (OLD, NEW):
            self.calls.note(item.scope, item.raw, item.document)
        self.root = self.calls.weights()
        self.number = 0

    def ask(self, prompt: int, answer: str, day: int = 0, environment: Fingerprint = OLD, **more: Any) -> None:
        """Record one call."""
        self.number += 1
        begin = {"payloads": (ids("prompt.ids", [prompt]),), "environment": environment.raw,
                 "wall_ns": WALL + day * DAY + self.number, "facts": more.pop("facts", {})}  # fmt: skip
        answered = (ids("output.ids", list(answer.encode())), text("output.text", answer))
        self.calls.call(self.number, begin, weights=self.root, **{"payloads": answered, **more})

    def hours(self) -> list[tuple[Any, ...]]:
        """Drain, and return the counts: across, pairs, differed, surface, untold."""
        query = "select across, pairs, differed, surface, untold from pair_hours order by hour, across"
        return rows(drained(self.spots), query)


@pytest.fixture
def traffic(tmp_path: Path, both: str) -> Traffic:
    assert both
    return Traffic(tmp_path / "store")


def test_each_run_stands_in_one_pair_at_most_whatever_the_batches(traffic: Traffic) -> None:
    for number in range(7):
        traffic.ask(1, "b" if number == 3 else "a")
        if number in (0, 2, 3):
            traffic.hours()  # a batch of its own
    assert traffic.hours() == [(0, 3, 1, 0, 0)]


def test_what_is_equal_once_evened_out_and_what_has_no_text_are_counted_apart(traffic: Traffic) -> None:
    traffic.ask(1, "“Yes”")
    traffic.hours()
    traffic.ask(1, '"Yes" ')
    traffic.ask(2, "yes")
    traffic.ask(2, "no")
    for answer in (4, 5):
        traffic.ask(3, "", payloads=(ids("output.ids", [answer]),))
    assert traffic.hours() == [(0, 3, 3, 1, 1)]


def test_what_was_run_again_or_served_again_is_no_traffic(traffic: Traffic) -> None:
    traffic.ask(1, "a")
    traffic.ask(1, "b", facts={"kind": "replay"})
    traffic.ask(1, "c", facts={"kind": "cached"})
    assert traffic.hours() == []
    traffic.ask(1, "a")
    assert traffic.hours() == [(0, 1, 0, 0, 0)]
    assert rows(traffic.spots, "select runs, outputs from equal_inputs") == [(3, 2)]  # without what was served


def test_other_environments_are_counted_apart_and_what_came_with_a_change_is_named(traffic: Traffic) -> None:
    for day in range(12):
        for prompt in range(20):
            for twice in range(2):
                new = day >= 6
                traffic.ask(prompt, f"b{twice}" if new else "a", day, NEW if new else OLD)
    assert {row[0] for row in traffic.hours()} == {0}
    engine = database.reading(traffic.spots.url, traffic.spots.database)
    answer = told(engine, Span(), "version")
    engine.dispose()
    assert answer["raw"]["pairs"] == 240
    assert answer["raw"]["differed"] == 120
    assert [change["rose"] for change in answer["changes"]] == [True]
    assert answer["changes"][0]["hour"] == (WALL + 6 * DAY) // 3_600_000_000_000
    assert [item["field"] for item in answer["changes"][0]["came"]] == ["gpu.driver_version"]
    assert [(item["label"], item["raw"]["differed"]) for item in answer["by"]] == [
        ("driver 570", 0),
        ("driver 580", 120),
    ]
    assert answer["diverged_inputs"] == 20


def test_a_store_from_before_is_counted_when_it_is_upgraded(traffic: Traffic) -> None:
    """The migration counts what the writer would have counted, but for texts."""
    for number in range(30):
        traffic.ask(number % 4, "ab"[number % 11 == 0], number // 5, NEW if number > 17 else OLD)
    counted = traffic.hours()
    source = (database.scripts() / "versions" / "0004_pairs.py").read_text(encoding="utf-8")
    with written(traffic.spots) as connection:
        connection.execute(sql("delete from pair_hours"))
        connection.execute(sql(source.partition('COUNT = """')[2].partition('"""')[0]))
    again = rows(traffic.spots, "select across, pairs, differed, surface, untold from pair_hours order by hour, across")
    assert again == [(*row[:3], 0, row[2]) for row in counted]
    assert sum(row[1] for row in again) == 14


# -- the command --------------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    traffic = Traffic(tmp_path / "store")
    for number in range(400):
        traffic.ask(number % 40, "ab"[number % 97 == 0], number // 100)
    traffic.calls.close()
    drained(traffic.spots)
    (tmp_path / "store" / "key").chmod(0o600)
    return ["drift", "--db", str(traffic.spots.database)]


def test_it_measures_fails_passes_and_cannot_tell(asked: list[str], command: Command, tmp_path: Path) -> None:
    found = command(*asked, "--json", "--by", "model")
    assert found.returncode == 0, found.stderr
    answer = json.loads(found.stdout)
    assert answer["schema"] == "provenance/drift/1"
    assert answer["raw"]["pairs"] == 200
    assert answer["raw"]["differed"] == 5
    assert answer["normalised"]["differed"] == 5
    assert [item["label"] for item in answer["by"]] == ["tiny"]
    assert [command(*asked, "--fail-over", limit).returncode for limit in ("0.001", "0.02", "0.5")] == [1, 3, 0]
    unclear = command(*asked, "--fail-over", "0.02")
    assert unclear.stdout.startswith("Could not tell: 5 of 200 pairs of equal input differ")
    assert "more pairs, if the share stays what it is" in unclear.stdout
    page = tmp_path / "page.html"
    shown = command(*asked, "--html", str(page), "--by", "host")
    assert shown.returncode == 0
    assert "inputs have given more than one output" in shown.stdout
    assert "provenance diff " in shown.stdout
    assert "<svg" in page.read_text(encoding="utf-8")


def test_a_span_without_pairs_could_not_be_told(asked: list[str], command: Command) -> None:
    found = command(*asked, "--since", "2031-01-01")
    assert found.returncode == 3
    assert found.stdout.startswith("Could not tell: no input was asked twice")
    first = json.loads(command(*asked, "--json", "--until", "2026-01-02").stdout)
    assert first["raw"]["pairs"] == 40
    assert first["bucket"] == "hour"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--by", "moon"], "none of model, host, gpu, version"), (["--fail-over", "7"], "is no share"),
        (["--fail-over", "nan"], "is no share"), (["--since", "soon"], "--since 'soon' is no time"),
        (["--until", "soon"], "--until 'soon' is no time"),
        (["--since", "2026-01-02", "--until", "2026-01-01"], "there is no time between them"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence(
    options: list[str], said: str, command: Command, asked: list[str]
) -> None:
    found = command(*asked, *options)
    assert found.returncode == 2
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
