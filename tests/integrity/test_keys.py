"""The key of a store: made once, by whoever is first, for its owner alone; never replaced, never shared."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from provenance.errors import BadSetting, SpoolRefused
from provenance.integrity import keys
from tests.fakes.records import is_one_sentence

RACE = """
import sys, time
from pathlib import Path
from provenance.integrity import keys
folder, start = Path(sys.argv[1]), float(sys.argv[2])
while time.time() < start: pass
print(" ".join(keys.load(folder / str(n) / "key").hex() for n in range(40)))
"""


def test_a_key_is_made_on_first_use_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "key"
    first = keys.load(path)
    assert len(first) == keys.SIZE
    assert keys.load(path) == first == path.read_bytes()
    assert keys.load(tmp_path / "other") != first


def test_a_key_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        keys.load(tmp_path / "folder" / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder" / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


def test_processes_that_race_agree_on_one_key(tmp_path: Path) -> None:
    start = str(time.time() + 0.5)
    racers = [
        subprocess.Popen([sys.executable, "-c", RACE, str(tmp_path), start], stdout=subprocess.PIPE) for _ in range(4)
    ]
    said = {racer.communicate(timeout=60)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4
    assert len(said) == 1
    assert len(set(said.pop().split())) == 40
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["key"] * 40  # and no drafts


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o660, 0o601])
def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    keys.load(path)
    path.chmod(mode)
    with pytest.raises(SpoolRefused, match=f"chmod 600 {path}") as caught:
        keys.load(path)
    assert is_one_sentence(str(caught.value))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    keys.load(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(SpoolRefused):
        keys.load(path)


@pytest.mark.parametrize("size", [0, 1, 31, 33, 4096])
def test_a_file_of_the_wrong_size_is_refused_and_left_as_it_is(tmp_path: Path, size: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"k" * size)
    path.chmod(0o600)
    with pytest.raises(BadSetting, match="and not 32; restore it") as caught:
        keys.load(path)
    assert is_one_sentence(str(caught.value))
    assert path.read_bytes() == b"k" * size


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path):
        with pytest.raises(BadSetting, match="is not a file"):
            keys.load(path)


@pytest.mark.parametrize(
    ("mode", "owner", "group", "private"),
    [(0o600, 7, 8, True), (0o640, 7, 8, False), (0o440, 0, 8, True), (0o440, 0, 9, False), (0o460, 0, 8, False),
     (0o444, 0, 8, False), (0o400, 0, 9, True), (0o400, 6, 8, False)],
)  # fmt: skip
def test_a_key_is_private_to_its_user_or_handed_by_root_to_the_group_of_its_user(
    mode: int, owner: int, group: int, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    monkeypatch.setattr(os, "getegid", lambda: 8)
    facts = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, group, 32, 0, 0, 0))
    assert keys._private(facts) is private
