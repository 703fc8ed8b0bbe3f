"""Settings: arguments beat variables, variables beat the file, and whatever cannot be used is named in one sentence."""

import dataclasses
import os
import pwd
from pathlib import Path

import pytest

from provenance.errors import BadSetting
from provenance.settings import Settings, embedded, hide, homeless, load, places
from tests.fakes.records import is_one_sentence


def config(home: Path, text: str) -> dict[str, str]:
    path = home / ".config" / "provenance" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return {"HOME": str(home)}


def test_without_anything_said_the_defaults_hold(tmp_path: Path) -> None:
    assert load({}, {"HOME": str(tmp_path)}) == Settings()
    assert load({"capture": None, "evidence": None}, {"HOME": str(tmp_path)}) == Settings()


def test_arguments_beat_variables_and_variables_beat_the_file(tmp_path: Path) -> None:
    environ = config(tmp_path, 'capture = "off"\nevidence = 1\nweights = "files"')
    assert load({}, environ) == Settings(capture="off", evidence=1, weights="files")
    environ |= {"PROVENANCE_CAPTURE": "digest", "PROVENANCE_EVIDENCE": "2"}
    assert load({}, environ) == Settings(capture="digest", evidence=2, weights="files")
    assert load({"evidence": 3}, environ) == Settings(capture="digest", evidence=3, weights="files")


@pytest.mark.parametrize("item", dataclasses.fields(Settings), ids=lambda item: item.name)
def test_every_setting_has_a_variable_an_argument_and_help(item: "dataclasses.Field[object]", tmp_path: Path) -> None:
    choices = item.metadata["choices"]
    number = max(7, item.metadata.get("least", 0))
    kind = type(item.default)
    value = {bool: "1", int: str(number), float: "7"}.get(kind, choices[-1] if choices else "/x/y")
    environ = {"HOME": str(tmp_path), f"PROVENANCE_{item.name.upper()}": value}
    assert getattr(load({}, environ), item.name) == {bool: True, int: number, float: 7.0}.get(kind, value)
    assert load({item.name: value}, {"HOME": str(tmp_path)}) == load({}, environ)
    assert item.metadata["help"].endswith(".")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1048576", 1 << 20), ("512M", 512 << 20), ("2g", 2 << 30), ("3GiB", 3 << 30), ("64MB", 64 << 20), ("0", 0)],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert load({"spool_max": text}, {"HOME": "/none"}).spool_max == size


@pytest.mark.parametrize("text", ["1", "true", "YES", " on "])
def test_yes_is_read_however_it_is_written(text: str) -> None:
    assert load({}, {"HOME": "/none", "PROVENANCE_DISABLED": text}).disabled is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_no_is_read_however_it_is_written(text: str) -> None:
    assert load({}, {"HOME": "/none", "PROVENANCE_DISABLED": text}).disabled is False


@pytest.mark.parametrize(
    ("name", "value"),
    [("CAPTURE", "everything"), ("CAPTURE", ""), ("EVIDENCE", "many"), ("EVIDENCE", "-1"), ("EVIDENCE", "33"),
     ("EVIDENCE", "4.5"), ("WEIGHTS", "yes"), ("WRITER", "daemon"), ("DISABLED", "maybe"), ("IDENTIFY_HOST", "2"),
     ("DURABILITY", "most"), ("ON_FAILURE", "log"), ("MAX_BLOCK", "-1"), ("MAX_BLOCK", "nan"), ("MAX_BLOCK", "inf"),
     ("SPOOL_MAX", "12"), ("SPOOL_MAX", "1T"), ("SPOOL_MAX", "G"), ("SYNC_INTERVAL", "soon")],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_named_with_where_it_came_from(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=f"PROVENANCE_{name} is '{value}'; write") as caught:
        load({}, {"HOME": str(tmp_path), f"PROVENANCE_{name}": value})
    assert is_one_sentence(str(caught.value))
    with pytest.raises(BadSetting, match=f"the argument {name.lower()} is"):
        load({name.lower(): value}, {"HOME": str(tmp_path)})


def test_an_unknown_name_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="sets 'captur', which is no setting; there are db, spool"):
        load({"captur": "off"}, {"HOME": str(tmp_path)})
    with pytest.raises(BadSetting, match="the settings file sets 'database'"):
        load({}, config(tmp_path, 'database = "x"'))


@pytest.mark.parametrize("text", ["capture = ", "\ufeffx", "a = 1\na = 2"])
def test_a_settings_file_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"config\.toml cannot be read") as caught:
        load({}, config(tmp_path, text))
    assert is_one_sentence(str(caught.value))


def test_a_named_settings_file_must_be_there(tmp_path: Path) -> None:
    named = tmp_path / "mine.toml"
    environ = {"HOME": str(tmp_path), "PROVENANCE_CONFIG": str(named)}
    with pytest.raises(BadSetting, match=f"PROVENANCE_CONFIG names {named}, which does not exist"):
        load({}, environ)
    named.write_text("disabled = true")
    assert load({}, environ).disabled is True


# -- places -------------------------------------------------------------------------------------------


def test_without_anything_said_everything_lies_in_the_users_own_folders() -> None:
    spots = places(Settings(), {"HOME": "/h", "XDG_CONFIG_HOME": "/c"})
    assert spots.database == Path("/h/.local/share/provenance/provenance.db")
    assert spots.url == "sqlite:////h/.local/share/provenance/provenance.db"
    assert spots.spool == Path("/h/.local/share/provenance/provenance.db.spool")
    assert spots.key_file == Path("/c/provenance/key")


def test_a_home_that_is_no_folder_is_not_used_and_stops_nothing(tmp_path: Path) -> None:
    """HOME=/dev/null is what services say where they mean: no home. The account has one all the same."""
    (tmp_path / "file").write_text("")
    for named in ("/dev/null", str(tmp_path / "file")):
        assert homeless({"HOME": named})
        assert load({}, {"HOME": named}) == Settings()
        spots = places(Settings(), {"HOME": named})
        assert spots.database == Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".local/share/provenance/provenance.db"
    assert not homeless({"HOME": str(tmp_path)})
    assert not homeless({"HOME": "/not/there/yet"})
    assert not homeless({})


def test_a_relative_folder_in_an_xdg_variable_does_not_count() -> None:
    assert places(Settings(), {"HOME": "/h", "XDG_DATA_HOME": "here"}).database == Path(
        "/h/.local/share/provenance/provenance.db"
    )


def test_a_path_and_a_url_of_one_file_are_one_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": "/h"}
    named = [
        places(Settings(db=text), environ)
        for text in ("a.db", "sqlite:///a.db", f"sqlite:///{tmp_path}/a.db", "./a.db")
    ]
    assert {spots.database for spots in named} == {tmp_path / "a.db"}
    assert {spots.spool for spots in named} == {tmp_path / "a.db.spool"}
    assert len({spots.url for spots in named}) == 1
    assert embedded(named[0].url) == tmp_path / "a.db"


def test_home_is_understood_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    spots = places(Settings(db="~/a.db", spool="~/s", key_file="~/k"), {"HOME": "/h"})
    assert (spots.database, spots.spool, spots.key_file) == (Path("/h/a.db"), Path("/h/s"), Path("/h/k"))


def test_two_servers_have_two_spools_and_no_password_in_their_names() -> None:
    one, other = (places(Settings(db=f"postgresql://me:secret@{host}/x"), {"HOME": "/h"}) for host in ("a", "b"))
    assert one.database is other.database is None
    assert one.spool != other.spool
    assert one.spool.parent == Path("/h/.local/state/provenance")
    assert "secret" not in str(one.spool)


@pytest.mark.parametrize(
    "text",
    ["sqlite://", "sqlite:///", "sqlite:///:memory:", "mysql://me:secret@host/db", "http://x", "sqlite:relative://x", "/",
     "~no-such-user-here/a.db"],
)  # fmt: skip
def test_a_url_that_names_no_database_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(BadSetting) as caught:
        places(Settings(db=text), {"HOME": "/h"})
    assert is_one_sentence(str(caught.value))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [("postgresql://me:pa@ss@host/db", "postgresql://me:***@host/db"), ("postgresql://host/db", "postgresql://host/db"),
     ("postgresql://me@host/db", "postgresql://me@host/db")],
)  # fmt: skip
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert hide(url) == shown


def test_a_path_object_is_as_good_as_its_text(tmp_path: Path) -> None:
    assert load({"db": tmp_path / "a.db"}, {"HOME": "/h"}).db == os.fspath(tmp_path / "a.db")


def test_resolving_makes_nothing(tmp_path: Path) -> None:
    places(load({}, {"HOME": str(tmp_path)}), {"HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == [tmp_path / "home"]
