"""blame, on runs that were really recorded: of a real model whose settings change, and of functions."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

import provenance
from provenance.cli.blame import lines, moment
from provenance.errors import BadSetting
from provenance.explain.blame import blame
from provenance.explain.history import Observation
from tests.conftest import Command
from tests.fakes.records import is_one_sentence


@pytest.fixture
def recorded(db: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record a function whose answer hangs on one variable of the environment, while another one moves too."""
    provenance.init(db=db, writer="off")
    draw = random.Random(2)

    @provenance.record(name="answer")
    def answer(question: str) -> str:
        return question + threads

    for n in range(240):
        threads, precision = draw.choice("12"), draw.choice(["highest", "high"])
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setenv("MKL_NUM_THREADS", threads if n % 8 else "3")
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1" if precision == "high" else "0")
        answer(f"question {n % 6}")
    provenance.flush()
    return db


def test_it_finds_the_variable_and_names_what_moved_with_it(recorded: Path, command: Command) -> None:
    found = command("blame", "--json")
    answer = json.loads(found.stdout)
    (accused,) = answer["accused"]
    assert (found.returncode, answer["schema"], answer["verdict"]) == (1, "provenance/blame/1", "accused"), found.stderr
    assert (accused["field"], accused["inputs_held"]) == ("env.OMP_NUM_THREADS", True)
    assert accused["changes"][0]["a"] == "1"
    assert [item["field"] for item in accused["confounded"]] == ["env.MKL_NUM_THREADS"]
    assert accused["equal"]["diverged"] == 0
    assert (answer["runs"], answer["inputs"], answer["pairs"]["pairs"]) == (240, 6, 120)
    assert answer["noise"]["diverged"] == 0 < answer["noise"]["pairs"]

    said = command("blame").stdout
    assert said.startswith("1 field goes with divergence, at a false-discovery rate of 0.0001.\n")
    for part in (
        "1. env.OMP_NUM_THREADS  (",
        "   confounded: env.MKL_NUM_THREADS, ",
        "Noise floor: a configuration disagrees",
    ):
        assert part in said
    assert "NVIDIA_TF32" not in said


def test_runs_are_chosen_by_run_input_and_time(recorded: Path, command: Command) -> None:
    key = json.loads(command("show", "last", "--json").stdout)["sequences"][0]["input_key"]
    for arguments in (["last"], ["--input", key], ["--input", key[:8]], ["last:0"], ["last", "--since", "2026-01-01"]):
        answer = json.loads(command("blame", "--json", *arguments).stdout)
        assert (answer["inputs"], answer["runs"]) == (1, 40), arguments
    assert json.loads(command("blame", "--json", "--limit", "24").stdout)["runs"] == 24
    none = command("blame", "--since", "2100-01-01")
    assert (none.returncode, none.stdout.splitlines()[0]) == (3, "No run fits the question.")


@pytest.mark.parametrize(
    "arguments",
    [["--since", "yesterday"], ["--input", "xyz"], ["--input", "0" * 64], ["last", "--input", "abcdef"], ["ffff"], ["last:7"],
     ["--rate", "0"], ["--rate", "1.5"], ["--rate", "nan"], ["--limit", "1"], ["--since", "99999-01-01"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_input_is_one_sentence(db: Path, command: Command, arguments: list[str]) -> None:
    provenance.init(db=db, writer="off")
    provenance.record(len)("four")
    found = command("blame", *arguments)
    assert (found.returncode, found.stdout) == (2, ""), found
    assert is_one_sentence(found.stderr.strip()), found.stderr


def test_an_input_that_was_run_once_is_too_little(db: Path, command: Command) -> None:
    provenance.init(db=db, writer="off")
    provenance.record(len)("four")
    found = command("blame", "last")
    assert (found.returncode, found.stdout.splitlines()[0]) == (3, "No run fits the question.")


def test_a_real_models_settings_are_found(db: Path, command: Command) -> None:
    pytest.importorskip("torch")
    from provenance.cli import models

    provenance.init(db=db, writer="off")
    model, tokenizer = models.tiny()
    provenance.wrap(model, tokenizer)
    prompts = [
        tokenizer(text, return_tensors="pt")
        for text in ("Once upon a time", "The cat sat", "She said", "In the garden")
    ]
    draw = random.Random(5)
    for _ in range(16):
        length = draw.choice([3, 6])
        for prompt in prompts:
            model.generate(**prompt, max_new_tokens=length)
    provenance.flush()
    answer = json.loads(command("blame", "--json", "--model", "tiny").stdout)
    assert answer["verdict"] == "accused", answer["because"]
    (accused,) = answer["accused"]
    assert accused["field"] == "generation.max_new_tokens"
    assert (accused["equal"]["diverged"], answer["noise"]["diverged"]) == (0, 0)
    assert answer["noise"]["pairs"] > 0
    assert answer["runs"] == 64
    assert command("blame", "--model", "none").returncode == 3


# -- words ------------------------------------------------------------------------------------------------


def said(groups: list[list[Observation]]) -> str:
    return "\n".join(text for _, text in lines(blame(groups)))


def two(at: int, output: int, **own: Any) -> list[Observation]:
    return [Observation(0, (at,), (), dict.fromkeys(own, 0)), Observation(output, (at + 1,), (), own)]


def test_long_lists_are_cut_and_lockstep_is_said() -> None:
    names = {f"f{k:02}": 1 for k in range(10)}
    alike = [two(10 * n, 1, x=1, y=1, **names) for n in range(40)] + [
        two(1000 + 10 * n, 0, x=0, y=0, **dict.fromkeys(names, 0)) for n in range(60)
    ]
    alone = [two(5000 + 10 * n, 1, x=1, y=1, **dict.fromkeys(names, 0)) for n in range(20)]
    odd = [two(8000 + 100 * k, 0, x=0, y=0, **{name: int(name == f"f{k:02}") for name in names}) for k in range(10)]
    text = said(alike + alone + odd)
    assert "1. x  (semantic)" in text
    assert "   always moves with y: they cannot be told apart" in text
    assert text.count("   confounded: ") == 8
    assert "   and 2 more; --json lists them" in text
    assert "inputs were run too few times" in text
    assert "p 1e-" in text


def test_what_differs_in_every_pair_is_named() -> None:
    groups = [two(10 * n, n % 2, **{f"f{k}": 1 for k in range(8)}) for n in range(40)]
    assert "Differs in every pair, so that nothing can be said of it: f0, f1, f2, f3, f4, f5 and others." in said(
        groups
    )


def test_what_follows_the_input_is_named() -> None:
    draw = random.Random(3)
    groups = [
        [
            Observation((g % 2) * draw.randrange(2), (100 * g + k,), (), {"x": (g % 2) * draw.randrange(3)})
            for k in range(20)
        ]
        for g in range(60)
    ]
    assert "not accused: x differs more often on inputs that diverge easily" in said(groups)


def test_times_are_dates_or_ages() -> None:
    day = 86_400_000_000_000
    assert moment("1970-01-02", 0) == day
    assert moment("1970-01-02T00:00:00+01:00", 0) == day - 3_600_000_000_000
    assert [moment(text, 10 * day) for text in ("1d", "24h", "1440m", "1w")] == [9 * day, 9 * day, 9 * day, 3 * day]
    assert moment("999w", day) == 0
    for text in ("d", "1y", "-1d", "", "1.5d", "2026-13-01"):
        with pytest.raises(BadSetting, match="is no time"):
            moment(text, 0)
