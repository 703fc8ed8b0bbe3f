"""The files of docs/deploy: they parse, and every command, flag and variable in them is one that there is."""

import configparser
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from provenance.cli import metrics
from provenance.cli.main import COMMANDS, app
from provenance.settings import Settings
from tests.conftest import ROOT

DEPLOY = ROOT / "docs" / "deploy"
UNIT = DEPLOY / "provenance-writer.service"


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(UNIT.read_text())
    return parser


def options(command: str) -> set[str]:
    group: Any = typer.main.get_command(app([command]))
    return {name for item in group.commands[command].params for name in item.opts}


def arguments() -> list[list[str]]:
    """Return every command line of the folder, from `writer` on."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    pod = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    docker = re.search(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert docker
    return [
        shlex.split(unit()["Service"]["ExecStart"])[1:], ["writer", *compose["services"]["writer"]["command"]],
        ["writer", *pod["initContainers"][0]["args"]], ["writer", *yaml.safe_load(docker[1])],
    ]  # fmt: skip


@pytest.mark.parametrize("line", arguments(), ids=["systemd", "compose", "kubernetes", "docker"])
def test_every_command_line_is_one_that_the_writer_takes(line: list[str]) -> None:
    command, *rest = line
    assert command in COMMANDS
    flags = {item for item in rest if item.startswith("-")}
    assert flags
    assert flags <= options(command)
    assert metrics.address(rest[rest.index("--metrics") + 1])[1] == 9464
    float(rest[rest.index("--max-lag") + 1])


def test_every_variable_is_a_setting() -> None:
    known = {f"PROVENANCE_{item.name.upper()}" for item in dataclasses.fields(Settings)}
    found = {name for path in DEPLOY.iterdir() for name in re.findall(r"PROVENANCE_[A-Z_]+", path.read_text())}
    assert {"PROVENANCE_DB", "PROVENANCE_SPOOL", "PROVENANCE_WRITER"} <= found <= known


def test_every_metric_that_the_page_names_is_served() -> None:
    served = {name for name, _ in metrics.SEEN.values()} | {
        f"{name}_total" for name, _ in (*metrics.DONE.values(), *metrics.PAIRED.values())
    }
    served |= {"provenance_database_up", "provenance_writer_elected", "provenance_last_commit_timestamp_seconds"}
    named = set(re.findall(r"provenance_[a-z_]+", (DEPLOY / "README.md").read_text()))
    assert named == served


def test_the_unit_is_hardened_and_may_write_to_the_spool_alone() -> None:
    service = unit()["Service"]
    wanted = {"NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
              "CapabilityBoundingSet": "", "UMask": "0077", "RestartPreventExitStatus": "2"}  # fmt: skip
    assert {key: service[key] for key in wanted} == wanted
    settings = dict(
        line.split("=", 1)
        for line in (DEPLOY / "writer.env").read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    assert settings["PROVENANCE_SPOOL"].startswith(service["ReadWritePaths"] + "/")
    assert service["EnvironmentFile"] == "/etc/provenance/writer.env"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """The program is not installed where the unit says, so another one stands for it."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/provenance/bin/provenance", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, [])


def test_the_side_cars_share_the_spool_and_the_user_with_the_model() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert compose["model"]["user"] == compose["writer"]["user"]
    assert set(compose["model"]["volumes"]) == set(compose["writer"]["volumes"])
    pod = yaml.safe_load((DEPLOY / "kubernetes.yaml").read_text())["spec"]["template"]["spec"]
    writer, (model,) = pod["initContainers"][0], pod["containers"]
    places = [{item["name"]: item.get("value") for item in part["env"]} for part in (writer, model)]
    assert places[0]["PROVENANCE_SPOOL"] == places[1]["PROVENANCE_SPOOL"]
    assert places[1]["PROVENANCE_WRITER"] == "off"
    mounts = [{item["mountPath"] for item in part["volumeMounts"]} for part in (writer, model)]
    assert "/spool" in mounts[0] & mounts[1]
    assert str(pod["securityContext"]["runAsUser"]) in (DEPLOY / "Dockerfile").read_text()
