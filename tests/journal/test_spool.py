"""The appending end: what is acknowledged is there, what is not is named, and nobody else can look or write."""

import hashlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance.errors import JournalError, SpoolRefused
from provenance.facts import Noted
from provenance.journal import frame, records, spool
from provenance.journal.recovery import open_segment
from provenance.journal.room import prepare
from provenance.journal.spool import Journal, alive, segments
from tests.conftest import Command
from tests.fakes.records import about, is_one_sentence

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "spool", about())
    yield made
    made.close()


def found(folder: Path) -> dict[int, Any]:
    """Return every record of a spool by its number, read as its frame says."""
    read: dict[int, Any] = {}
    for path in segments(folder):
        for item in open_segment(path).frames():
            assert item.seq not in read
            assert item.seq > max(read, default=-1)
            read[item.seq] = records.read(item.kind, item.seq, item.payload) if item.kind == frame.GAP else item.payload
    return read


def explained(folder: Path) -> tuple[set[int], set[int]]:
    """Return the numbers of the records that are there, and of those that gap records name."""
    there = found(folder)
    named: set[int] = set()
    for record in there.values():
        if isinstance(record, Noted):
            gap = orjson.loads(record.document)
            named |= set(range(gap["first"], gap["last"] + 1))
    return set(there), named


# -- the folder ---------------------------------------------------------------------------------------


def test_the_spool_and_its_files_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Journal(tmp_path / "deep" / "spool", about())
    finally:
        os.umask(before)
    made.close()
    assert stat.S_IMODE((tmp_path / "deep" / "spool").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "deep" / "spool").iterdir()] == [0o600]


def test_a_spool_that_is_a_link_is_refused_and_nothing_is_written_behind_it(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    (tmp_path / "spool").symlink_to(tmp_path / "victim")
    with pytest.raises(SpoolRefused, match="is a link or a file") as caught:
        Journal(tmp_path / "spool", about())
    assert is_one_sentence(str(caught.value))
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_spool_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("mine")
    with pytest.raises(SpoolRefused) as caught:
        prepare(tmp_path / "spool")
    assert is_one_sentence(str(caught.value))
    assert (tmp_path / "spool").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o750, 0o755, 0o777, 0o720])
def test_a_spool_that_others_can_enter_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(mode)
    with pytest.raises(SpoolRefused, match="can be entered by others; run: chmod 700"):
        prepare(tmp_path / "spool")
    assert stat.S_IMODE((tmp_path / "spool").stat().st_mode) == mode


@root_only
def test_a_spool_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(mode=0o700)
    os.chown(tmp_path / "spool", 65534, 65534)
    with pytest.raises(SpoolRefused, match="belongs to another user"):
        prepare(tmp_path / "spool")


def test_a_spool_that_cannot_be_made_names_both_variables(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolRefused, match="Set PROVENANCE_DB or PROVENANCE_SPOOL") as caught:
        prepare(tmp_path / "file" / "spool")
    assert is_one_sentence(str(caught.value))


@root_only
def test_a_spool_that_cannot_be_written_to_is_refused() -> None:
    """As a user who may not: root may write everywhere."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom provenance.errors import SpoolRefused\n"
        "from provenance.journal.spool import prepare\n"
        "try: prepare(Path(sys.argv[1]))\nexcept SpoolRefused as error: print(error)"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "spool"
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        folder.chmod(0o500)
        Path(place).chmod(0o711)
        said = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c", code, str(folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if "No module named" in said.stderr or "Permission denied" in said.stderr:
        pytest.skip("this interpreter cannot be run by another user")
    assert "cannot be written to" in said.stdout, said.stderr


def test_links_and_strangers_are_no_segments(tmp_path: Path, journal: Journal) -> None:
    (journal.folder / "a.seg").symlink_to(journal.path)
    (journal.folder / "b.seg").mkdir()
    (journal.folder / "c.damaged").write_text("")
    assert segments(journal.folder) == [journal.path]
    assert segments(tmp_path / "none") == []


# -- appending ----------------------------------------------------------------------------------------


def test_what_is_acknowledged_is_in_the_file_at_once(journal: Journal) -> None:
    for seq in range(5):
        assert journal.append(frame.FINGERPRINT, [b"piece ", str(seq).encode()]) == seq
        assert found(journal.folder)[seq] == f"piece {seq}".encode()


def test_eight_threads_lose_nothing_and_numbers_rise_in_the_file(journal: Journal) -> None:
    acknowledged: dict[int, bytes] = {}

    def work(thread: int) -> None:
        for n in range(500):
            payload = f"{thread}.{n} ".encode() * (1 + n % 7)
            acknowledged[journal.append(frame.FINGERPRINT, [payload])] = payload

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(journal.folder) == acknowledged  # `found` refuses a number that does not rise
    assert sorted(acknowledged) == list(range(8 * 500))


def test_a_record_inside_a_records_write_is_dropped_and_not_waited_for(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal handler that infers would do: it runs in the thread that holds the lock."""

    def interrupted(descriptor: int, data: bytes) -> int:
        with pytest.raises(JournalError, match="inside another"):
            journal.append(frame.FINGERPRINT, [b"from the handler"])
        return os.write(descriptor, data)

    monkeypatch.setattr(spool, "write", interrupted)
    journal.append(frame.FINGERPRINT, [b"outer"])
    assert found(journal.folder) == {0: b"outer"}
    assert journal.lost == 1


def test_a_closed_journal_takes_nothing_and_says_so(journal: Journal) -> None:
    journal.close()
    with pytest.raises(JournalError, match="was not kept"):
        journal.append(frame.FINGERPRINT, [b"late"])
    journal.close()


# -- a full disk --------------------------------------------------------------------------------------

FULL = """
import os, resource, sys
from pathlib import Path
from provenance.errors import JournalError
from provenance.journal import frame
from provenance.journal.spool import Journal
journal = Journal(Path(sys.argv[1]), {})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
kept, sizes = [], [10, 700, 3000]
def append(n):
    try:
        kept.append(journal.append(frame.FINGERPRINT, [bytes([n % 256]) * sizes[n % 3]]))
    except JournalError:
        pass
n = 0
for cycle in range(20):
    size = os.path.getsize(journal.path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000 * (cycle % 5) + cycle, hard))
    for _ in range(cycle % 4 + 6):
        append(n); n += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    if cycle % 3 or cycle == 19:
        append(n); n += 1
print(journal.next_seq, journal.lost, *kept)
"""


def test_every_record_that_a_full_disk_refused_is_named_once_there_is_room(python: Command, tmp_path: Path) -> None:
    """A limit on the file's size answers as a full disk does: a short write first, then an error."""
    done = python(FULL, str(tmp_path / "spool"))
    assert done.returncode == 0, done.stderr
    count, lost, *kept = map(int, done.stdout.split())
    there, named = explained(tmp_path / "spool")
    gaps = {seq for seq, record in found(tmp_path / "spool").items() if isinstance(record, Noted)}
    assert there - gaps == set(kept)  # what was acknowledged, and nothing else
    assert named == set(range(count)) - there  # every hole is named, and no record that is there
    assert len(named) == lost
    assert len(gaps) > 5
    assert open_segment(segments(tmp_path / "spool")[0]).damage == []


class Disk:
    """A disk that takes only so many bytes of each of the next writes; None takes all."""

    def __init__(self, *takes: int | None) -> None:
        self.takes = list(takes)

    def __call__(self, descriptor: int, data: bytes) -> int:
        take = self.takes.pop(0) if self.takes else None
        if take == 0:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, data[:take])


def test_a_gap_record_that_does_not_fit_claims_no_record_that_does(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "write", Disk(None, 0, 0, None, 0, 0, None))
    journal.append(frame.FINGERPRINT, [b"zero"])
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"one"])
    assert journal.append(frame.FINGERPRINT, [b"two"]) == 2  # the gap record found no room, this one did
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"three"])
    assert journal.append(frame.FINGERPRINT, [b"six"]) == 6
    assert explained(journal.folder) == ({0, 2, 4, 5, 6}, {1, 3})
    assert journal.lost == 2


def test_a_torn_write_that_cannot_be_cut_off_costs_no_later_record(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, refuse = os.ftruncate, [True]

    def truncate(descriptor: int, size: int) -> None:
        if refuse.pop() if refuse else False:
            raise OSError(5, "Input/output error")
        cut(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", truncate)
    monkeypatch.setattr(spool, "write", Disk(None, 30, None, None, 45))
    journal.append(frame.FINGERPRINT, [b"zero"])
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"one" * 20])
    journal.append(frame.FINGERPRINT, [b"three"])
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"four" * 20])
    journal.append(frame.FINGERPRINT, [b"six"])
    assert explained(journal.folder) == ({0, 2, 3, 5, 6}, {1, 4})


def test_a_stream_that_ends_names_what_it_lost_last(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "write", Disk(None, 0))
    journal.append(frame.FINGERPRINT, [b"zero"])
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"one"])
    journal.close()
    assert explained(journal.folder) == ({0, 2}, {1})


# -- segments -----------------------------------------------------------------------------------------


def test_a_new_segment_holds_the_digest_of_the_sealed_one(journal: Journal) -> None:
    for turn in range(3):
        journal.append(frame.FINGERPRINT, [b"x" * 100 * turn])
        sealed = journal.path
        journal.rotate()
        header = open_segment(journal.path).header
        assert header.previous == hashlib.sha256(sealed.read_bytes()).digest()
        assert (header.index, header.first_seq) == (turn + 1, turn + 1)
        assert header.stream == open_segment(sealed).header.stream
        assert header.salt != open_segment(sealed).header.salt
    assert open_segment(segments(journal.folder)[0]).header.previous == bytes(32)
    assert len(found(journal.folder)) == 3


def test_rotation_under_load_loses_nothing_and_seals_what_is_there(journal: Journal) -> None:
    stop = threading.Event()
    kept: list[int] = []

    def work() -> None:
        while not stop.is_set():
            kept.append(journal.append(frame.FINGERPRINT, [b"load"]))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        journal.rotate()
    stop.set()
    for thread in threads:
        thread.join()
    assert set(found(journal.folder)) == set(kept) == set(range(journal.next_seq))
    paths = segments(journal.folder)
    assert len(paths) == 31
    for sealed, following in pairwise(paths):
        assert open_segment(following).header.previous == hashlib.sha256(sealed.read_bytes()).digest()


def test_a_full_or_old_segment_is_due_for_rotation(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    due = [journal.old]
    monkeypatch.setattr(spool, "SEGMENT_BYTES", 1000)
    journal.append(frame.FINGERPRINT, [b"x" * 1000])
    due.append(journal.old)
    journal.rotate()
    due.append(journal.old)
    monkeypatch.setattr(spool, "SEGMENT_SECONDS", -1.0)
    due.append(journal.old)
    assert due == [False, True, False, True]


def test_no_segment_is_seen_before_it_is_locked_and_has_its_header(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever drains would take it for a dead one, or for a file that is none of ours."""
    seen: list[str] = []
    for module, name in ((spool.fcntl, "flock"), (spool.os, "write")):  # type: ignore[attr-defined]
        real = getattr(module, name)

        def watched(*arguments: Any, real: Any = real, name: str = name) -> Any:
            seen.extend(f"before {name}" for path in segments(journal.folder) if path != first)
            return real(*arguments)

        monkeypatch.setattr(module, name, watched)
    first = journal.path
    journal.rotate()
    monkeypatch.undo()
    assert seen == []
    assert alive(journal.path)
    assert sorted(path.suffix for path in journal.folder.iterdir()) == [".seg", ".seg"]


def test_a_rotation_that_finds_no_room_leaves_the_old_segment_in_use(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append(frame.FINGERPRINT, [b"zero"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: 5)
        with pytest.raises(OSError, match="No space"):
            journal.rotate()
    assert journal.append(frame.FINGERPRINT, [b"one"]) == 1
    assert found(journal.folder) == {0: b"zero", 1: b"one"}
    assert list(journal.folder.iterdir()) == [journal.path]


# -- alive --------------------------------------------------------------------------------------------


def test_a_segment_is_alive_as_long_as_its_process_appends(journal: Journal) -> None:
    assert alive(journal.path)
    sealed = journal.path
    journal.rotate()
    assert not alive(sealed)
    assert alive(journal.path)
    journal.close()
    assert not alive(journal.path)
    assert not alive(journal.folder / "none.seg")


def test_a_killed_process_is_dead_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom provenance.journal.spool import Journal\n"
        "print(Journal(Path(sys.argv[1]), {}).path, flush=True)\ntime.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "spool")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    assert alive(path)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not alive(path)


def test_a_forked_child_that_lets_go_leaves_its_parents_stream_alive(journal: Journal) -> None:
    child = os.fork()
    if child == 0:
        journal.forget()
        os._exit(0 if alive(journal.path) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert alive(journal.path)
    assert journal.append(frame.FINGERPRINT, [b"on"]) == 0
    journal.forget()
    with pytest.raises(JournalError):
        journal.append(frame.FINGERPRINT, [b"off"])
