"""How a process may end, fork or be killed without losing what it recorded."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance import writer
from provenance.facts import Run
from provenance.settings import load, places
from tests.conftest import Command
from tests.fakes import models

# One process pays for the import of torch; each of its children is a process of its own with a stream of its own,
# generates, tells what it was answered and ends in its own way before anything of Python's could tidy up.
ENDINGS = """
import os, resource, signal, sys
import provenance
from tests.fakes import models

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
model, kill = models.llama(), {"exit": lambda: os._exit(0), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
                               "abort": os.abort}
read, write = os.pipe()
for how in sys.argv[2:]:
    for number in range(int(sys.argv[1])):
        child = os.fork()
        if child == 0:
            provenance.wrap(model)
            result = model.generate(models.tensor([5, 6, 7 + number]), max_new_tokens=4, eos_token_id=None)
            os.write(write, f"{how} {number} {' '.join(map(str, result[0, 3:].tolist()))}\\n".encode())
            kill[how]()
        os.waitpid(child, 0)
os.close(write)
sys.stdout.buffer.write(os.read(read, 1 << 20))
"""


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def _drained(db: Path) -> list[Run]:
    """Move everything into the store, as whoever comes after a dead process does, and read it back."""
    assert writer.drain(places(load()), 60)
    return models.stored(db)


def _nothing_is_lost(python: Command, db: Path, times: int) -> None:
    ran = python(ENDINGS, str(times), "exit", "kill", "abort")
    assert ran.returncode == 0, ran.stderr
    told = [line.split() for line in ran.stdout.splitlines()]
    assert [how for how, *_ in told].count("abort") == times
    assert len(told) == 3 * times
    runs = _drained(db)
    found = sorted((run.sequences[0].input_ids or (), run.sequences[0].output_ids or ()) for run in runs)
    said = sorted(((5, 6, 7 + int(number)), tuple(map(int, ids))) for _, number, *ids in told)
    assert found == said
    assert {run.status for run in runs} == {"ok"}
    assert len({run.fields["context.pid"].value for run in runs}) == 3 * times
    assert {len(run.sequences[0].steps) for run in runs} == {4}


def test_ends_without_any_tidying_up_lose_nothing(python: Command, db: Path) -> None:
    """By os._exit, by SIGKILL, by abort: ten each, the moment a generate has returned."""
    _nothing_is_lost(python, db, 10)


@pytest.mark.long
def test_fifty_ends_of_each_kind_lose_nothing(python: Command, db: Path) -> None:
    _nothing_is_lost(python, db, 50)


FAMILY = """
import multiprocessing, os, sys
import provenance
from tests.fakes import models

def say(name, model, *ids):
    with provenance.run(name=name):
        return model.generate(models.tensor(list(ids)), max_new_tokens=3, eos_token_id=None)[0].tolist()

def spawned(number):
    return say(f"spawned {number}", provenance.wrap(models.llama(), tokenizer=models.letters()), 5, 6 + number)

def forked(number):
    say(f"child {number}", model, 6, 7)
    grandchild = os.fork()
    if grandchild == 0:
        say(f"grandchild {number}", model, 8, 9)
        os._exit(0)
    os.waitpid(grandchild, 0)
    say(f"child {number}, again", model, 6, 7)
    sys.exit(0) if number == 0 else os._exit(0)

if __name__ == "__main__":
    model = provenance.wrap(models.llama(), tokenizer=models.letters())
    before = say("parent", model, 5, 6)
    provenance.flush()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            forked(number)
        children.append(child)
    say("parent, meanwhile", model, 5, 6)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert say("parent, afterwards", model, 5, 6) == before
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(spawned, range(3), chunksize=1))
"""


def test_forked_and_spawned_children_have_streams_of_their_own_and_all_are_complete(tmp_path: Path, db: Path) -> None:
    script = tmp_path / "family.py"
    script.write_text(FAMILY)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    streams = {path.name.partition("-")[0] for path in (db.parent / "p.db.spool").glob("*.seg")}
    runs = {run.name: run for run in _drained(db)}
    names = [f"{who} {number}" for who in ("child", "grandchild", "spawned") for number in range(3)]
    names += [f"child {number}, again" for number in range(3)] + ["parent", "parent, meanwhile", "parent, afterwards"]
    assert sorted(runs) == sorted(names)
    assert {run.status for run in runs.values()} == {"ok"}
    pids = {name: run.fields["context.pid"].value for name, run in runs.items()}
    # The parent, three children, three grandchildren and one worker.
    assert len(set(pids.values())) == len(streams) == 8
    for number in range(3):
        assert pids[f"child {number}"] == pids[f"child {number}, again"]
        assert pids[f"grandchild {number}"] != pids[f"child {number}"]
    for run in runs.values():
        assert run.fields["weights.loaded_root"].known or run.name.startswith("spawned")
        assert run.sequences[0].input_text in ("bc", "bd", "be", "cd", "ef")
    for number, answer in enumerate(orjson.loads(ran.stdout)):
        (sequence,) = runs[f"spawned {number}"].sequences
        assert [*(sequence.input_ids or ()), *(sequence.output_ids or ())] == answer


MIDWAY = """
import sys, time
import provenance
from transformers import LogitsProcessor
from tests.fakes import models

class Stalls(LogitsProcessor):
    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 24:
            print("stalled", flush=True)
            time.sleep(120)
        return scores

model = provenance.wrap(models.llama(), tokenizer=models.letters())
with provenance.run(name="first"):
    model.generate(models.tensor(), max_new_tokens=3)
with provenance.run(name="doomed", tags={"suite": "night"}):
    ids = models.letters()("Tell me more", return_tensors="pt").input_ids
    model.generate(ids, max_new_tokens=30, eos_token_id=None, logits_processor=[Stalls()])
"""


def test_a_call_killed_midway_shows_as_crashed_with_its_prompt(command: Command, db: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", MIDWAY], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "stalled"
        running: list[dict[str, Any]] = orjson.loads(command("log", "--json").stdout)
        assert [(line["name"], line["status"]) for line in running] == [("doomed", "running"), ("first", "ok")]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    lines: list[dict[str, Any]] = orjson.loads(command("log", "--json").stdout)
    assert [(line["name"], line["status"]) for line in lines] == [("doomed", "crashed"), ("first", "ok")]
    assert lines[0]["text_in"] == "Tell me more"
    shown = command("show", lines[0]["run_id"])
    assert shown.returncode == 0, shown.stderr
    assert "crashed" in shown.stdout
    assert "Tell me more" in shown.stdout
    assert "suite=night" in shown.stdout
    assert "doomed" in command("log", "--status", "crashed").stdout
