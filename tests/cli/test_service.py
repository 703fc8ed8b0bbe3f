"""writer as a service: it stops when told, tells what it does on a port, and says how far it is."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from provenance.cli import backlog, metrics
from provenance.errors import UsageError
from provenance.journal import spool
from provenance.settings import Places, load, places
from provenance.writer import Progress
from tests.conftest import Command
from tests.fakes import records as fake
from tests.fakes.postgres import Server
from tests.fakes.records import Calls, drained, ids, is_one_sentence, one, text


@pytest.fixture
def spots(db: Path) -> Places:
    found = places(load({}))
    found.key_file.parent.mkdir(parents=True)
    found.key_file.write_bytes(fake.KEY)
    found.key_file.chmod(0o600)
    return found


@pytest.fixture
def service() -> Iterator[Callable[..., "tuple[subprocess.Popen[str], str]"]]:
    """Start a writer that serves its pages, and return it with their address."""
    started: list[subprocess.Popen[str]] = []

    def go(*more: str) -> "tuple[subprocess.Popen[str], str]":
        command = [sys.executable, "-m", "provenance", "writer", "--metrics", "0", *more]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stderr is not None
        said = ""
        while "/metrics" not in said:
            said = child.stderr.readline()
            assert said, "it ended"
        match = re.search(r"http://[0-9.]+:[0-9]+", said)
        assert match
        return child, match[0]

    yield go
    for child in started:
        child.kill()
        child.communicate()


def asked(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def values(url: str) -> dict[str, float]:
    code, text = asked(url + "/metrics")
    assert code == 200
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if not line.startswith("#")}


def eventually(true: Callable[[], bool], seconds: float = 30.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it never came to be"
        time.sleep(0.1)


def life(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    calls.note("gap", fake.NOTHING, b'{"first":900,"last":906,"reason":"full"}')
    calls.close()


def test_the_rate_of_divergence_can_be_made_of_what_it_serves(
    spots: Places, service: Callable[..., "tuple[subprocess.Popen[str], str]"]
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    root = calls.weights()
    for n, answer in enumerate(("a", "a", "a", "b")):
        begin = {"payloads": (ids("prompt.ids", [1]),)}
        calls.call(
            n, begin, weights=root, payloads=(ids("output.ids", list(answer.encode())), text("output.text", answer))
        )
    calls.close()
    _, url = service()
    eventually(lambda: values(url)["provenance_pairs_total"] == 2)
    found = values(url)
    names = ("differing", "surface", "untold")
    assert [found[f"provenance_{name}_pairs_total"] for name in names] == [1, 0, 0]


def test_it_drains_tells_and_ends_with_0_when_told(
    spots: Places, service: Callable[..., "tuple[subprocess.Popen[str], str]"]
) -> None:
    child, url = service()
    life(spots)
    eventually(lambda: values(url)["provenance_drained_records_total"] == 7)
    eventually(lambda: values(url)["provenance_dropped_records"] == 7)
    found = values(url)
    assert (found["provenance_queue_bytes"], found["provenance_lag_seconds"], found["provenance_errors_total"]) == (
        0,
        0,
        0,
    )
    assert (found["provenance_database_up"], found["provenance_writer_elected"], found["provenance_kept_segments"]) == (
        1,
        1,
        1,
    )
    assert abs(found["provenance_last_commit_timestamp_seconds"] - time.time()) < 60
    code, text = asked(url + "/healthz")
    assert (code, json.loads(text)["status"]) == (200, "ok")
    assert asked(url + "/")[0] == 404
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 0
    assert one(spots, "select count(*) from ingested") == 7


def test_one_that_is_told_to_end_leaves_the_rest_in_the_spool(spots: Places) -> None:
    """A backlog of many batches: it ends after the batch that it is in, and the next one goes on."""
    calls = Calls(spots.spool)
    calls.prints()
    for n in range(6000):
        calls.call(n)
    calls.close()
    child = subprocess.Popen([sys.executable, "-m", "provenance", "writer"], stderr=subprocess.DEVNULL)
    eventually(lambda: spots.database is not None and spots.database.exists() and backlog.look(spots).trouble == "")
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 0
    drained(spots)
    assert one(spots, "select count(*) from ingested") == 4 + 12_000


def test_a_record_that_waits_is_lag_and_too_much_of_it_is_unwell(spots: Places, command: Command) -> None:
    drained(spots)
    life(spots)  # whose clock stood at the beginning of 2026
    seen = backlog.look(spots)
    (path,) = spool.segments(spots.spool)
    assert seen.segments == 1
    assert 0 < seen.bytes < path.stat().st_size
    assert seen.lag == pytest.approx(time.time() - fake.WALL / 1e9, rel=0.001)
    done = command("writer", "--status", "--json", "--max-lag", "60")
    form = json.loads(done.stdout)
    assert (done.returncode, form["well"], form["segments"]) == (1, False, 1)
    assert "has waited for" in form["reason"]
    drained(spots)
    done = command("writer", "--status", "--json", "--max-lag", "60")
    form = json.loads(done.stdout)
    assert (done.returncode, form["well"], form["bytes"], form["lag"], form["dropped"], form["kept"]) == (
        0,
        True,
        0,
        0.0,
        7,
        1,
    )
    text = command("writer", "--status")
    assert (text.returncode, text.stderr) == (0, "")
    assert "well" in text.stdout


def test_a_database_that_does_not_answer_is_503_with_the_reason(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "fresh_url", [server.fresh])
    spots = fake.places(tmp_path / "fleet")
    life(spots)
    drained(spots)
    away = replace(spots, url=re.sub(r"port=\d+", "port=1", spots.url))
    for where, code, up in ((spots, 200, 1.0), (away, 503, 0.0)):
        watch = backlog.Watch(where)
        eventually(lambda watch=watch: "not looked" not in watch.seen.trouble)  # type: ignore[misc]
        served = metrics.serve("0", Progress(), watch, 300.0)
        url = f"http://127.0.0.1:{served.server_address[1]}"
        found, text = asked(url + "/healthz")
        assert found == code, text
        assert values(url)["provenance_database_up"] == up
        if up:
            assert json.loads(text)["reason"] == ""
        else:
            assert "the database does not answer" in json.loads(text)["reason"]
        served.shutdown()
        served.server_close()
        watch.close()


@pytest.mark.parametrize("text", ["", "host", "1:2:x", "70000", "127.0.0.1:", "-1"])
def test_an_address_that_is_none_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="write a port") as caught:
        metrics.address(text)
    assert is_one_sentence(str(caught.value))


def test_a_port_that_is_taken_is_said(spots: Places, command: Command) -> None:
    watch = backlog.Watch(spots)
    served = metrics.serve("0", Progress(), watch, 300.0)
    done = command("writer", "--metrics", str(served.server_address[1]))
    served.shutdown()
    served.server_close()
    watch.close()
    assert done.returncode == 2
    assert "cannot listen on" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_another_spool_can_be_named(spots: Places, tmp_path: Path, command: Command) -> None:
    elsewhere = replace(spots, spool=tmp_path / "elsewhere")
    life(elsewhere)
    assert command("writer", "--spool", str(elsewhere.spool), "--idle", "0.2").returncode == 0
    assert one(spots, "select count(*) from ingested") == 7
