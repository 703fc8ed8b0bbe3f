"""env: what can decide an output here, complete and without secrets."""

import json
import os

from tests.conftest import Command


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
