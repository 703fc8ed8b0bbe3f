"""env: what can decide an output here, complete and without secrets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Command


def test_fields_have_values_or_reasons(command: Command) -> None:
    found = json.loads(command("env", "--json", "--no-torch").stdout)
    assert found["schema"] == "provenance/env/1"
    fields = found["environment"]
    assert fields["os.platform"]["value"] == "linux"
    for name, form in fields.items():
        assert "value" in form or form["state"] in ("unset", "not_applicable", "unknown", "redacted"), name
        if form.get("state") == "unknown":
            assert form["reason"], name


def test_torch_is_loaded_to_read_its_switches(command: Command) -> None:
    switches = json.loads(command("env", "--json").stdout)["switches"]
    assert switches["torch.num_threads"]["value"] >= 1
    assert switches["torch.deterministic_algorithms"]["value"] is False


def test_no_secret_is_told(command: Command) -> None:
    planted = {
        "HF_TOKEN": "hf_plantedplantedplanted",
        "OPENAI_API_KEY": "sk-plantedplanted",
        "XLA_FLAGS": "https://u:planted@h",
    }
    for arguments in (["--json"], ["--md"], ["--all"], []):
        said = command("env", "--no-torch", *arguments, env={**os.environ, **planted})
        assert "planted" not in said.stdout + said.stderr


def test_markdown_is_a_table(command: Command) -> None:
    assert command("env", "--no-torch", "--md").stdout.startswith("| field | value |\n| --- | --- |\n")


def test_what_is_unset_is_listed_on_request(command: Command) -> None:
    assert "env.MKL_CBWR" not in command("env", "--no-torch").stdout
    assert "env.MKL_CBWR" in command("env", "--no-torch", "--all").stdout


def test_over_two_hundred_fields_most_of_them_with_a_value(command: Command) -> None:
    """And two fresh processes differ in context alone; no value is one that still has to be resolved."""
    from provenance.catalogue.fields import spec

    one, other = (json.loads(command("env", "--json").stdout) for _ in range(2))
    fields = {**one["environment"], **one["switches"]}
    assert len(fields) > 200
    assert sum("value" in form for form in fields.values()) >= 120
    assert [name for name, form in fields.items() if str(form.get("value")).lower() in ("auto", "default")] == []
    again = {**other["environment"], **other["switches"]}
    assert {name for name in fields if fields[name] != again.get(name) and spec(name).effect != "none"} == set()
    assert fields.keys() == again.keys()


BAD = {
    "a bad variable": {"TORCH_LOGS": "nonsense"},
    "a missing library": {"PYTHONPATH": "broken"},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_where_torch_cannot_be_imported_all_else_is_told(
    bad: dict[str, str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("lock").returncode == 0
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise OSError("libcudart.so.12: cannot open shared object file")')
    env = {**os.environ, **{name: value.replace("broken", f"{broken.parent}:{ROOT}") for name, value in bad.items()}}
    found = command("env", "--json", env=env)
    assert found.returncode == 0, found.stderr
    assert found.stderr.startswith("provenance: torch cannot be imported: "), found.stderr
    assert len(found.stderr.splitlines()) == 1
    form = json.loads(found.stdout)
    assert form["environment"]["os.platform"] == {"value": "linux", "source": "system"}
    for field in (form["environment"]["torch.version"], form["switches"]["torch.num_threads"]):
        assert field["state"] == "unknown"
        assert field["reason"].startswith("torch cannot be imported: ")
    checked = command("check", env=env)
    assert checked.returncode == 3, checked.stdout + checked.stderr
    assert re.search("could not tell: .* more, not known in now: torch cannot be imported: ", checked.stdout)
    assert checked.stdout.splitlines()[-1].startswith("no fields that can act differ; ")
    assert command("lock", "--lock", "other.lock", env=env).returncode == 0


@pytest.mark.parametrize(
    "arguments", [["env", "--no-torch", "--json"], ["env", "--no-torch"], ["--help"], ["--version"], ["db", "path"]]
)
def test_a_full_disk_below_the_output_is_one_sentence(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-m", "provenance", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = "provenance: the output cannot be written: No space left on device.\n"
    assert (found.returncode, found.stderr) == (2, said)


def test_an_output_that_is_closed_is_none() -> None:
    line = f"exec {sys.executable} -m provenance --version >&-"
    found = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
