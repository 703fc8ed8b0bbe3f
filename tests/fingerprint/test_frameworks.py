"""Versions: as installed, from the names of folders; as torch reports itself; as the program's checkout says."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from provenance.catalogue.fields import table
from provenance.facts import Field, State
from provenance.fingerprint import frameworks
from provenance.fingerprint.reading import Missing, Moot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _fields() -> dict[str, Field]:
    return {item.name: item for item in frameworks.fields()}


def test_versions_from_folder_names_are_those_of_importlib_metadata() -> None:
    found = frameworks.installed(sys.path)
    expected: dict[str, str] = {}
    for item in importlib.metadata.distributions():
        expected.setdefault(frameworks.normal(item.metadata["Name"]), item.version)
    assert len(expected) >= 20
    assert {name: found.get(name) for name in expected} == expected


def test_every_package_that_the_catalogue_names_is_looked_for() -> None:
    found = _fields()
    for name in table():
        if not (name.startswith("lib.") and name.endswith(".version")):
            continue
        package = name.removeprefix("lib.").removesuffix(".version")
        try:
            assert found[name].value == importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            assert found[name].state is State.NOT_APPLICABLE
            assert found[name].reason == f"{package} is not installed"


def test_the_first_folder_on_the_path_wins_as_for_an_import(tmp_path: Path) -> None:
    for place, version in (("first", "2.0"), ("second", "1.0")):
        (tmp_path / place / f"Some_Package-{version}.dist-info").mkdir(parents=True)
    (tmp_path / "second" / "other.thing-3.1-py3.11.egg-info").mkdir()
    (tmp_path / "second" / "no_version.dist-info").mkdir()
    (tmp_path / "second" / "some_package").mkdir()
    path = [str(tmp_path / "absent"), str(tmp_path / "first"), str(tmp_path / "second")]
    assert frameworks.installed(path) == {"some-package": "2.0", "other-thing": "3.1"}


def test_the_digest_of_all_packages_notices_one_that_nobody_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _fields()["lib.all_digest"]
    assert _fields()["lib.all_digest"] == before
    (tmp_path / "surprise-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _fields()["lib.all_digest"] != before


def test_torch_reports_itself() -> None:
    found = _fields()
    assert found["torch.version"].value == torch.__version__
    assert found["torch.git_version"].value == torch.version.git_version
    config = torch.__config__.show()
    lasting = "\n".join(line for line in config.splitlines() if "capability usage" not in line)
    assert found["torch.build_config_digest"].value == "sha256:" + hashlib.sha256(lasting.encode()).hexdigest()
    assert found["cpu.capability"].value == torch.backends.cpu.get_cpu_capability()
    assert str(found["onednn.version"].value) in config


@pytest.mark.skipif(torch.version.cuda is not None, reason="speaks of a build without CUDA")
def test_what_a_build_without_cuda_has_not_is_beside_the_point() -> None:
    found = _fields()
    for name in ("cuda.runtime_version", "cudnn.version", "cublas.version", "nccl.version"):
        assert (found[name].state, found[name].reason) == (State.NOT_APPLICABLE, "torch is built without CUDA")
    assert found["rocm.version"].reason == "torch is built without ROCm"


def test_a_framework_that_is_not_loaded_is_not_loaded_by_us(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch")
        found = _fields()
        assert "torch" not in sys.modules
    for name in frameworks.TORCH:
        assert (found[name].state, found[name].reason) == (State.UNKNOWN, "torch is not loaded")
    assert found["lib.numpy.version"].value == importlib.metadata.version("numpy")


def test_what_is_loaded_is_told_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = frameworks.loaded()
    place = frameworks.WATCHED.index("vllm")
    monkeypatch.setitem(sys.modules, "vllm", sys)
    after = frameworks.loaded()
    assert (before[place], after[place]) == (False, True)
    assert before[:place] + before[place + 1 :] == after[:place] + after[place + 1 :]


# -- the program's checkout -------------------------------------------------------------------------


def _detached(git: Path) -> None:
    (git / "HEAD").write_text(f"{COMMIT}\n")


def _branch(git: Path) -> None:
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n")


def _packed(git: Path) -> None:
    (git / "HEAD").write_text("ref: refs/heads/some/branch\n")
    (git / "packed-refs").write_text(
        f"# pack-refs with: peeled fully-peeled sorted\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/some/branch\n"
    )


@pytest.mark.parametrize("make", [_detached, _branch, _packed])
def test_the_commit_is_read_from_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    make(tmp_path / "checkout" / ".git")
    program = tmp_path / "checkout" / "deep" / "down" / "app.py"
    program.parent.mkdir(parents=True)
    assert frameworks.code_version(str(program)) == COMMIT


def test_the_commit_of_a_worktree_is_found(tmp_path: Path) -> None:
    git = tmp_path / "main" / ".git"
    own = git / "worktrees" / "side"
    own.mkdir(parents=True)
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "side").write_text(COMMIT)
    (own / "HEAD").write_text("ref: refs/heads/side\n")
    (own / "commondir").write_text("../..\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / ".git").write_text(f"gitdir: {own}\n")
    assert frameworks.code_version(str(tmp_path / "side" / "app.py")) == COMMIT


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "the program is not in a git checkout"), ("ref: refs/heads/main\n", "the checkout has no commit yet")],
)
def test_where_there_is_no_commit_the_reason_is_said(text: str | None, reason: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "HEAD").write_text(text)
    with pytest.raises((Missing, Moot), match=reason):
        frameworks.code_version(str(tmp_path / "app.py"))
