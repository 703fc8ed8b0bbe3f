"""The environment of a process: made again only when something moved, never more than the allow-list, no credential."""

import copy
import functools
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance.catalogue.fields import spec, table
from provenance.facts import Field, Fingerprint, State
from provenance.fingerprint import environ, environment, frameworks, hardware
from provenance.fingerprint.environment import Environment
from provenance.fingerprint.reading import Missing, Moot, read, within
from tests.conftest import Command

# Thirty names that hold secrets on real machines. Many begin as listed ones do.
SECRET_NAMES = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "GOOGLE_API_KEY", "GITHUB_TOKEN", "GH_TOKEN", "GITLAB_TOKEN", "NPM_TOKEN",
    "PYPI_TOKEN", "TWINE_PASSWORD", "PIP_INDEX_URL", "UV_INDEX_URL", "DATABASE_URL", "PGPASSWORD", "REDIS_URL",
    "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "LANGFUSE_SECRET_KEY", "SLACK_TOKEN", "STRIPE_KEY", "HTTPS_PROXY",
    "TORCH_SECRET", "CUDA_SECRET_PATH", "PYTORCH_TOKEN", "TRITON_PASSWORD",
)  # fmt: skip


def _names(found: Fingerprint) -> dict[str, Any]:
    return {name: item.value for name, item in found.fields.items()}


# -- one reader, one field --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (Moot("no such thing here"), State.NOT_APPLICABLE, "no such thing here"),
        (Missing("not on this machine"), State.UNKNOWN, "not on this machine"),
        (AttributeError("no attribute 'x'"), State.UNKNOWN, "absent in this version: no attribute 'x'"),
        (OSError("driver not loaded"), State.UNKNOWN, "OSError: driver not loaded"),
        (RuntimeError("long" * 100), State.UNKNOWN, f"RuntimeError: {'long' * 100}"[:160]),
    ],
)
def test_a_reader_that_raises_is_a_field_with_a_reason(error: Exception, state: State, reason: str) -> None:
    def reader() -> object:
        raise error

    found = read("gpu.count", reader, "nvml")
    assert (found.name, found.value, found.state, found.reason) == ("gpu.count", None, state, reason)


def test_none_is_unset_and_every_other_value_is_a_value() -> None:
    assert read("x", lambda: None).state is State.UNSET
    values: tuple[object, ...] = (0, False, "", [], 0.0)
    for value in values:
        assert read("x", functools.partial(copy.copy, value)) == Field("x", value)


@pytest.mark.parametrize("broken", sorted(hardware.READERS)[::4] + sorted(frameworks.TORCH)[::4])
def test_one_broken_reader_costs_one_field(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        raise OSError("not today")

    whole = Environment().environment().fields
    readers = hardware.READERS if broken in hardware.READERS else frameworks.TORCH
    monkeypatch.setitem(readers, broken, refuse)
    found = Environment().environment().fields
    assert found.keys() == whole.keys()
    assert found[broken].reason == "OSError: not today"
    known = {name for name, item in whole.items() if item.known and name != broken}
    assert {name for name in known if found[name] != whole[name]} == set()


def test_a_collector_that_hangs_is_late_and_not_waited_for() -> None:
    release = threading.Event()

    def work() -> list[Field]:
        release.wait(60)
        return [Field("a", 1)]

    found = within(0.05, "NVML", work, ("a", "b"))
    release.set()
    assert [(item.name, item.reason) for item in found] == [
        (name, "NVML did not answer within 0.05 s") for name in "ab"
    ]


def test_a_collector_that_fails_names_its_failure_in_every_field() -> None:
    def work() -> Any:
        raise OSError("no driver")

    found = within(5, "NVML", work, ("a", "b"))
    assert [(item.name, item.reason) for item in found] == [("a", "OSError: no driver"), ("b", "OSError: no driver")]


# -- made again when something moved ----------------------------------------------------------------


def test_while_nothing_moves_the_fingerprint_is_the_very_object() -> None:
    found = Environment()
    assert found.environment() is found.environment()
    assert found.switches() is found.switches()


@pytest.mark.parametrize("value", ["high", None])
def test_a_variable_that_changes_inside_the_process_is_seen(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    found = Environment()
    before = found.environment()
    if value is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    after = found.environment()
    assert before.digest != after.digest
    assert before.fields["env.CUBLAS_WORKSPACE_CONFIG"].value == ":4096:8"
    assert after.fields["env.CUBLAS_WORKSPACE_CONFIG"].value == value
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert found.environment().digest == before.digest


def test_a_variable_outside_the_list_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Environment()
    before = found.environment()
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert found.environment() is before


def test_a_framework_loaded_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "xformers", raising=False)
    found = Environment()
    before, packages = found.environment(), found._packages
    monkeypatch.setitem(sys.modules, "xformers", sys)
    after = found.environment()
    assert after is not before
    assert found._packages is not packages  # the versions were read again


def test_the_machine_is_read_once_and_never_again_in_a_forked_child(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    fields = hardware.fields

    def counted() -> Any:
        reads.append(1)
        return fields()

    monkeypatch.setattr(hardware, "fields", counted)
    parent = Environment()
    whole = parent.environment()
    monkeypatch.setenv("LANG", "C.UTF-8")
    parent.environment()
    assert Environment(parent).environment().fields["cpu.model"] == whole.fields["cpu.model"]
    assert len(reads) == 1


def test_threads_that_ask_at_once_get_one_answer() -> None:
    found, answers, barrier = Environment(), [], threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        answers.append(found.environment().digest)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert len(answers) == 8


def test_fields_are_declared_in_the_catalogue_for_their_scope() -> None:
    found = Environment().environment().fields
    undeclared = {name for name in found if spec(name).group == "other"}
    assert undeclared == set()
    assert {f"env.{name}" for name in environ.names()} <= set(found)


def test_the_program_is_named_without_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = home / "work" / "app.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    found = {item.name: item for item in environment.program()}
    assert found["app.program"].value == "~/work/app.py"
    assert found["app.code_version"].reason == "the program is not in a git checkout"


# -- variables --------------------------------------------------------------------------------------


class Spy(dict[str, str]):
    """An environment that notes what it is asked for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[str] = []

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.append(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> str:
        self.asked.append(key)
        return super().__getitem__(key)

    def items(self) -> Any:
        raise AssertionError("the whole environment was read")

    values = __iter__ = keys = copy = items


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spy]:
    made = Spy({**dict.fromkeys(SECRET_NAMES, "secret"), "LANG": "C.UTF-8"})
    environ._keys.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(os, "environ", made)
        yield made
    environ._keys.cache_clear()


@pytest.mark.parametrize("read", ["snapshot", "fields"])
def test_only_listed_names_are_ever_read(read: str, spy: Spy) -> None:
    getattr(environ, read)()
    listed = {name.removeprefix("env.") for name in table() if name.startswith("env.")}
    assert set(spy.asked) == listed - {"VLLM_API_KEY"}  # the catalogue names it to say that nobody reads it
    assert not set(SECRET_NAMES) & set(spy.asked)


def test_no_listed_name_says_that_it_holds_a_secret() -> None:
    marks = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)($|_)")
    assert [name for name in environ.names() if marks.search(name)] == []


def test_the_snapshot_holds_the_raw_values_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environ.snapshot()
    monkeypatch.setenv("LANG", "somewhere")
    after = environ.snapshot()
    assert len(before) == len(after) == len(environ.names())
    assert [place for place, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [
        environ.names().index("LANG")
    ]


PLANTED = {name: f"planted-{number:02d}-Zq7Vw3" for number, name in enumerate(SECRET_NAMES)}
# Listed names, whose values nobody would call harmless.
DISGUISED = {
    "LD_LIBRARY_PATH": "https://user:Zq7Vw3pass@example.org/lib", "XLA_FLAGS": "--header=Bearer Zq7Vw3Zq7Vw3Zq7Vw3",
    "TRITON_CACHE_DIR": "hf_Zq7Vw3Zq7Vw3Zq7Vw3", "LANG": "sk-proj-Zq7Vw3Zq7Vw3Zq7Vw3",
}  # fmt: skip
RECORDS = """
import provenance
@provenance.record
def work(number):
    return number + 1
assert work(1) == 2
provenance.environment()
assert provenance.flush()
"""


def test_no_byte_that_is_written_holds_a_secret(python: Command, command: Command, tmp_path: Path) -> None:
    environment = {**os.environ, **PLANTED, **DISGUISED, "PROVENANCE_WRITER": "off", "OMP_NUM_THREADS": "3"}
    ran = python(RECORDS, "--token=planted-argument-Zq7Vw3", env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")
    shown = [
        command(*words, env=environment) for words in (("show", "--fields"), ("show", "--json"), ("env", "--json"))
    ]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 3
    everything = b"".join(path.read_bytes() for path in written)
    everything += "".join(one.stdout + one.stderr for one in shown).encode()
    assert b"Zq7Vw3" not in everything
    fields: dict[str, Any] = orjson.loads(shown[1].stdout)["fields"]
    assert fields["env.OMP_NUM_THREADS"]["value"] == "3"
    for name in DISGUISED:
        assert fields[f"env.{name}"] == {
            "state": "redacted", "reason": "the value looks like a credential", "source": "environment"
        }  # fmt: skip
    for name in SECRET_NAMES:
        assert f"env.{name}" not in fields


@pytest.mark.parametrize(
    "value",
    [
        "https://me:secret@example.org/simple", "postgresql+psycopg://u:p@db/x", "Authorization: Bearer abcdefgh1234",
        "Basic dXNlcjpwYXNz", "hf_abcdefghijklmnop", "sk-abcdefghijklmnop", "sk-proj-abcdefghijklmnop",
        "sk-ant-api03-abcdefghijklmnop", "ghp_abcdefghijklmnop", "github_pat_abcdefghijklmnop", "glpat-abcdefghijkl",
        "xoxb-abcdefghijkl", "AKIAABCDEFGHIJKLMNOP", "ASIAABCDEFGHIJKLMNOP", "AIzaSyabcdefghijklmnop",
        "eyJhbGciOiJIUzI1NiJ9.e30.x", "-----BEGIN PRIVATE KEY-----", "--flag=1 --key hf_abcdefghijklmnop",
    ],
)  # fmt: skip
def test_values_that_look_like_credentials_are_redacted(value: str) -> None:
    found = environ.field("XLA_FLAGS", value)
    assert (found.state, found.value) == (State.REDACTED, None)
    assert value not in repr(found)
    assert found != found


@pytest.mark.parametrize(
    "value",
    [
        "", "1", ":4096:8", "garbage_collection_threshold:0.8,max_split_size_mb:128", "/usr/local/cuda/lib64:/opt/lib",
        "/data/hf-cache/models", "SkylakeX", "COMPATIBLE,STRICT", "en_US.UTF-8", "expandable_segments:True",
        "granularity=fine,compact,1,0", "https://example.org:8080/path", "skip_everything",
    ],
)  # fmt: skip
def test_ordinary_values_are_kept(value: str) -> None:
    found = environ.field("XLA_FLAGS", value)
    assert (found.state, found.value) == (State.VALUE, value)


def test_a_variable_that_nobody_set_is_unset_and_an_empty_one_is_empty() -> None:
    assert environ.field("LANG", None).state is State.UNSET
    assert environ.field("LANG", None) == environ.field("LANG", None)
    assert environ.field("LANG", "") != environ.field("LANG", None)


def test_a_very_long_value_is_cut() -> None:
    assert environ.field("LD_LIBRARY_PATH", "/x" * 5000).value == "/x" * 1000


def test_neither_home_nor_user_stands_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself names the user in the folder of its cache."""
    monkeypatch.setenv("HOME", "/srv/people/alice")
    monkeypatch.setenv("USER", "alice")
    monkeypatch.setenv("HF_HOME", "/srv/people/alice/hf")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib:/srv/people/alice/lib:/data/alice-2/x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_alice")
    found = {item.name: item.value for item in environ.fields()}
    assert found["env.HF_HOME"] == "~/hf"
    assert found["env.LD_LIBRARY_PATH"] == "/opt/lib:~/lib:/data/[user]-2/x"
    assert found["env.TORCHINDUCTOR_CACHE_DIR"] == "/tmp/torchinductor_[user]"
