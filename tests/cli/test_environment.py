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
