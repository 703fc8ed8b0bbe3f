"""The cache of digests: what it remembers, and that neither crash, rubbish nor another process spoils it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provenance.fingerprint import cache as caches
from provenance.fingerprint.cache import Cache, Look

LOOK = Look(1, 2, 3, 4, 5)
ONE, OTHER = "a" * 64, "b" * 64


def _now() -> int:
    return time.time_ns()


def test_what_one_process_remembers_another_knows(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "digests"
    first, second = Cache(path), Cache(path)
    assert second.get("file", LOOK) is None
    first.put("file", LOOK, ONE, _now())
    assert first.get("file", LOOK) == second.get("file", LOOK) == ONE
    assert second.get("tensors", LOOK) is None
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("changed", range(5))
def test_a_file_that_looks_otherwise_is_another_file(changed: int, tmp_path: Path) -> None:
    store = Cache(tmp_path / "digests")
    store.put("file", LOOK, ONE, _now())
    other = Look(*(value + (place == changed) for place, value in enumerate(LOOK)))
    assert store.get("file", other) is None


@pytest.mark.parametrize("which", ["mtime", "ctime"])
@pytest.mark.parametrize(("age", "kept"), [(0, False), (1.9, False), (2.1, True), (-100, False)])
def test_a_file_touched_within_two_seconds_is_not_remembered(
    which: str, age: float, kept: bool, tmp_path: Path
) -> None:
    store, now = Cache(tmp_path / "digests"), _now()
    look = LOOK._replace(**{which: now - int(age * 1e9)})
    store.put("file", look, ONE, now)
    assert store.get("file", look) == (ONE if kept else None)
    assert Cache(tmp_path / "digests").get("file", look) == (ONE if kept else None)


def test_the_newest_line_counts(tmp_path: Path) -> None:
    store = Cache(tmp_path / "digests")
    store.put("file", LOOK, ONE, _now())
    store.put("file", LOOK, OTHER, _now())
    assert Cache(tmp_path / "digests").get("file", LOOK) == OTHER


def test_cut_at_any_byte_it_still_knows_the_lines_before(tmp_path: Path) -> None:
    path = tmp_path / "digests"
    store = Cache(path)
    store.put("file", LOOK, ONE, _now())
    first = path.stat().st_size
    second = LOOK._replace(inode=9)
    store.put("file", second, OTHER, _now())
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        found = Cache(path)
        assert found.get("file", LOOK) == (ONE if size >= first else None)
        assert found.get("file", second) is None
        found.put("file", second, OTHER, _now())
        assert Cache(path).get("file", second) == OTHER


def test_a_spoilt_byte_costs_its_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "digests"
    store = Cache(path)
    store.put("file", LOOK, ONE, _now())
    store.put("file", LOOK._replace(inode=9), OTHER, _now())
    whole = path.read_bytes()
    for place in range(len(whole) // 2):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        found = Cache(path)
        assert found.get("file", LOOK) in (ONE, None)
        assert found.get("file", LOOK._replace(inode=9)) == OTHER


@pytest.mark.parametrize("rubbish", [b"\0" * 5000, b"\n\n\n", b"00000000 []\n", os.urandom(4096)])
def test_rubbish_in_its_place_is_passed_over(rubbish: bytes, tmp_path: Path) -> None:
    path = tmp_path / "digests"
    path.write_bytes(rubbish)
    store = Cache(path)
    assert store.get("file", LOOK) is None
    store.put("file", LOOK, ONE, _now())
    assert Cache(path).get("file", LOOK) == ONE


def test_a_place_that_cannot_be_written_remembers_nothing_and_never_raises(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "folder", tmp_path / "link", Path("/proc/nowhere/digests"), None):
        store = Cache(path)
        store.put("file", LOOK, ONE, _now())
        assert store.get("file", LOOK) is None
    assert not (tmp_path / "elsewhere").exists()


def test_it_stays_small_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "LIMIT", 4000)
    path = tmp_path / "digests"
    store = Cache(path)
    for inode in range(200):
        store.put("file", LOOK._replace(inode=inode), ONE, _now())
        assert path.stat().st_size <= 4000
    fresh = Cache(path)
    assert fresh.get("file", LOOK._replace(inode=199)) == ONE
    assert fresh.get("file", LOOK._replace(inode=0)) is None
    assert list(tmp_path.glob("digests*")) == [path]


def test_many_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "digests"
    code = (
        "import sys, time; from pathlib import Path; from provenance.fingerprint.cache import Cache, Look\n"
        "store = Cache(Path(sys.argv[1]))\n"
        "for n in range(200): store.put('file', Look(int(sys.argv[2]), n, 1, 1, 1), 'a' * 64, time.time_ns())"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), str(number)]) for number in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
    store = Cache(path)
    assert all(store.get("file", Look(device, n, 1, 1, 1)) == ONE for device in range(4) for n in range(200))
