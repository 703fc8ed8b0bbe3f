"""Caches, container, interpreter and the accelerators of other makers: values where they are, reasons where not."""

from pathlib import Path

import pytest

from provenance.fingerprint import platforms
from provenance.fingerprint.reading import Missing, Moot


def test_every_field_has_a_value_or_a_reason() -> None:
    found = {item.name: item for item in platforms.fields()}
    assert set(found) == set(platforms.READERS)
    for item in found.values():
        assert item.value is not None or item.reason, item.name
    assert found["cpu.threads_per_core"].value in (1, 2, 4, 8)
    assert found["mps.device_name"].reason == "not an Apple machine"


def test_caches_are_told_by_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, level, kind, size in (("index0", "1", "Data", "48K"), ("index2", "2", "Unified", "1M")):
        place = tmp_path / name
        place.mkdir()
        (place / "level").write_text(level)
        (place / "type").write_text(kind)
        (place / "size").write_text(size + "\n")
    monkeypatch.setattr(platforms, "CACHES", str(tmp_path))
    assert platforms.cpu_caches() == {"L1d": "48K", "L2": "1M"}
    monkeypatch.setattr(platforms, "CACHES", str(tmp_path / "none"))
    with pytest.raises(Missing, match="does not list"):
        platforms.cpu_caches()


def test_an_image_is_what_the_container_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(platforms.IMAGE, "sha256:1234")
    assert platforms.image() == "sha256:1234"
    monkeypatch.delenv(platforms.IMAGE)
    monkeypatch.setattr(platforms, "container", lambda: "docker")
    with pytest.raises(Missing, match=platforms.IMAGE):
        platforms.image()
    monkeypatch.setattr(platforms, "container", lambda: "none seen")
    with pytest.raises(Moot):
        platforms.image()
