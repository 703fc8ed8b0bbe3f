"""Forks, threads, workers and tasks at once: each call has exactly one start and one end, in whatever process it ran."""

import asyncio
import collections
import multiprocessing
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import provenance
from provenance import writer
from provenance.facts import End, Start
from provenance.journal import records, spool
from provenance.journal.recovery import open_segment
from provenance.settings import load, places
from tests.conftest import Command
from tests.fakes.records import one, rows


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


@provenance.record
def call(number: int) -> int:
    return -number


def accounted() -> collections.Counter[str]:
    """Hold every stream of the spool to one start and one end a call, without holes; count calls by their ends."""
    found: collections.Counter[str] = collections.Counter()
    seen: dict[str, list[Any]] = collections.defaultdict(list)
    for path in spool.segments(places(load()).spool):
        scan = open_segment(path)
        seen[spool.stream_of(path)] += [
            records.read(item.kind, item.seq, item.payload) for item in scan.frames(sealed=True)
        ]
        assert not scan.damage
    for stream in seen.values():
        assert [record.seq for record in stream] == list(range(len(stream)))
        starts = {record.seq for record in stream if isinstance(record, Start)}
        ends = [record.output for record in stream if isinstance(record, End)]
        assert sorted(output.start_seq for output in ends) == sorted(starts)
        found += collections.Counter(str(output.status) for output in ends)
    return found


FORKS = """
import os, sys, threading
import provenance

forks, each = map(int, sys.argv[1:])
@provenance.record
def call(number): return -number
provenance.init(writer="off")
over = threading.Event()
made = [0, 0, 0, 0]
def hammer(thread):
    while not over.is_set():
        call(thread)
        made[thread] += 1
threads = [threading.Thread(target=hammer, args=(n,)) for n in range(4)]
[thread.start() for thread in threads]
children = []
for fork in range(forks):
    child = os.fork()
    if child == 0:
        for n in range(each):
            call(n)
        if fork % 3 == 0:  # a child of a child
            inner = os.fork()
            if inner == 0:
                call(1)
                os._exit(0)
            os.waitpid(inner, 0)
        os._exit(0)
    children.append(child)
    if len(children) > 7:
        assert os.waitpid(children.pop(0), 0)[1] == 0
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
over.set()
[thread.join() for thread in threads]
print(sum(made) + forks * each + len(range(0, forks, 3)))
"""


def _forked(forks: int, each: int) -> None:
    code = [sys.executable, "-c", FORKS, str(forks), str(each)]
    ran = subprocess.run(code, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stderr
    found = accounted()
    assert sum(found.values()) == int(ran.stdout)
    assert len(found) == 1
    assert len({spool.stream_of(path) for path in spool.segments(places(load()).spool)}) == 1 + forks + len(
        range(0, forks, 3)
    )


def test_forks_under_threads_that_write_lose_nothing_and_do_not_hang(db: Path) -> None:
    _forked(96, 20)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_ninety_six_forks_of_a_thousand_records(db: Path) -> None:
    _forked(96, 1000)


WORKERS = """
import sys, torch, provenance
from torch.utils.data import DataLoader, Dataset

@provenance.record
def tokenize(text): return [len(text)]
class Texts(Dataset):
    def __len__(self): return 64
    def __getitem__(self, place): return torch.tensor(tokenize("x" * place))
if __name__ == "__main__":
    provenance.init(writer="off")
    tokenize("before")
    for method in sys.argv[1:]:
        loader = DataLoader(Texts(), batch_size=8, num_workers=2, multiprocessing_context=method)
        assert sum(int(item) for batch in loader for item in batch) == sum(range(64))
    tokenize("after")
"""


def test_workers_that_load_data_record_into_streams_of_their_own(tmp_path: Path, db: Path) -> None:
    program = tmp_path / "workers.py"
    program.write_text(WORKERS)
    ran = subprocess.run(
        [sys.executable, str(program), "fork", "spawn", "forkserver"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert sum(accounted().values()) == 3 * 64 + 2


PRELOADED = """
import os, signal, sys, time
import provenance

@provenance.record
def answer(text): return text.upper()
provenance.init(writer="off")
answer("at preload")  # as a server that loads its application before it forks
pids = []
for worker in range(4):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        for n in range(50):
            answer(f"{worker} {n}")
        sys.exit(0)
    pids.append(pid)
for pid in pids:
    os.waitpid(pid, 0)
answer("after")
"""


def test_workers_of_a_server_that_loads_first_and_forks_then_are_complete(python: Command, db: Path) -> None:
    ran = python(PRELOADED)
    assert ran.returncode == 0, ran.stderr
    assert sum(accounted().values()) == 202
    assert writer.drain(places(load()), 60)
    spots = places(load())
    assert one(spots, "select count(*) from runs where status = 'ok'") == 202
    assert one(spots, "select count(*) from streams") == 5


def _pooled(number: int) -> int:
    return call(number)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_of_processes_are_complete(method: str, db: Path) -> None:
    provenance.init()
    call(0)
    with multiprocessing.get_context(method).Pool(3) as pool:
        assert pool.map(_pooled, range(90)) == [-n for n in range(90)]
        pool.close()
        pool.join()
    assert sum(accounted().values()) == 91


def test_threads_at_once_have_one_end_a_call(db: Path) -> None:
    provenance.init()

    def work(thread: int) -> None:
        for n in range(200):
            call(thread * 1000 + n)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(accounted().values()) == 64 * 200


def test_of_five_thousand_tasks_a_third_cancelled_each_has_one_end(db: Path) -> None:
    """Cancelled before they begin, while they wait, and after they are done."""
    provenance.init()
    chance = random.Random(4)
    began = 0

    @provenance.record
    async def ask(number: int) -> int:
        nonlocal began
        began += 1
        await asyncio.sleep(0.001 * (number % 5))
        return number

    async def all_of_them() -> tuple[int, int]:
        tasks = [asyncio.create_task(ask(n)) for n in range(5000)]
        await asyncio.sleep(0)
        for task in chance.sample(tasks, 1500):
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(item, int) for item in answers), sum(
            isinstance(item, asyncio.CancelledError) for item in answers
        )

    done, cancelled = asyncio.run(all_of_them())
    assert done + cancelled == 5000
    assert cancelled > 1000
    found = accounted()
    assert sum(found.values()) == began
    assert writer.drain(places(load()), 60)
    counted = dict(rows(places(load()), "select status, count(*) from runs group by status"))
    assert counted == {"ok": done, "aborted": began - done}
