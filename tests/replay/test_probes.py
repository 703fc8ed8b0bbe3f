"""Probes: what holds is measured on the model's own answers, what breaks is shown with its first case."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch

import provenance
from provenance.determinism import seeds, switches
from provenance.errors import BadFile, BadSetting, UsageError
from provenance.replay import arms, fresh, probes
from provenance.replay.arms import Answer, compare
from provenance.replay.probes import BROKEN, HOLDS, PROPERTIES, TOKENS, UNTESTED, Report, Verdict, probe
from tests.conftest import Command
from tests.fakes import models

PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 42], [9, 8, 7, 6, 5, 4, 3, 20, 21]]
SMALL: dict[str, Any] = {"tokens": 4, "batch": 3}


def answer(tokens: list[int], *rows: list[float]) -> Answer:
    return Answer(tokens, torch.tensor(rows))


# -- comparing --------------------------------------------------------------------------------------


def test_equal_bits_are_no_difference_and_infinities_and_no_numbers_count_as_bits() -> None:
    rows = [1.0, float("inf"), float("nan")], [0.0, -1.0, 2.0]
    assert compare(answer([1, 2], *rows), answer([1, 2], *rows), "float32") is None
    found = compare(answer([1], [0.0, 1.0]), answer([1], [-0.0, 1.0]), "float32")
    assert found is not None  # another zero is another bit
    assert (found.token, found.moved) == (None, 0.0)


def test_a_move_is_told_in_units_of_the_models_own_type() -> None:
    one, other = answer([1, 2], [1.0, 4.0], [1.0, 20.0]), answer([1, 2], [1.0, 4.0], [1.0, 20.25])
    found = compare(one, other, "bfloat16")
    assert found is not None
    assert (found.step, found.token, found.moved, found.ulps) == (1, None, 0.25, 2.0)
    exact = compare(one, other, "float32")
    assert exact is not None
    assert exact.ulps == 0.25 / 2**-19


def test_what_follows_the_token_that_differs_does_not_count() -> None:
    one = answer([1, 2, 3], [0.0, 1.0], [5.0, 1.0], [9.0, 9.0])
    other = answer([1, 7, 3], [0.0, 1.0], [5.0, 1.5], [-99.0, 9.0])
    found = compare(one, other, "float32")
    assert found is not None
    assert (found.token, found.one, found.other, found.moved) == (1, 2, 7, 0.5)


def test_a_shorter_answer_is_another_answer() -> None:
    found = compare(answer([1, 2], [1.0], [1.0]), answer([1], [1.0]), "float32")
    assert found is not None
    assert (found.token, found.one, found.other) == (1, 2, None)


# -- a model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twin_rows() -> Report:
    """Probe the model that is always nearly tied, and the fresh process with it."""
    return probe("provenance.cli.models:twin_rows", None, PROMPTS, tokens=8, batch=4)


def test_the_nearly_tied_model_repeats_itself_and_breaks_where_sums_are_reordered(twin_rows: Report) -> None:
    assert twin_rows["run-to-run"].state == HOLDS
    assert twin_rows["across-processes"].state == HOLDS
    assert twin_rows["cold-and-warm"].state == HOLDS
    assert twin_rows["fixed-shapes-pinned"].state == HOLDS
    for name in ("batch-invariant", "padding-invariant", "cache-invariant", "attention-invariant"):
        item = twin_rows[name]
        assert item.state == BROKEN, name
        assert item.first is not None
        assert item.first[2].token is not None
        assert 0 < item.worst < 64
        assert len(item.turned) <= len(item.moved) <= len(item.prompts) == 3


def test_a_report_prints_and_is_a_document(twin_rows: Report) -> None:
    text, form = str(twin_rows), twin_rows.document()
    assert form["schema"] == "provenance/probe/1"
    assert [item["property"] for item in form["properties"]] == list(PROPERTIES)
    json.dumps(form)
    for item in form["properties"]:
        assert f"{item['property']:<20} {item['state']}" in text
        assert (item["first"] is None) == (item["state"] == HOLDS)
    batch = next(item for item in form["properties"] if item["property"] == "batch-invariant")
    assert batch["try"].endswith("pinned(model, threads=1): holds here")
    assert "run-to-run           holds (3 of 3 prompts, bit for bit)" in text


def test_the_exit_code_is_that_of_what_is_required(twin_rows: Report) -> None:
    assert twin_rows.code([]) == 0
    assert twin_rows.code(["run-to-run", "across-processes"]) == 0
    assert twin_rows.code(["run-to-run", "batch-invariant"]) == 1
    assert twin_rows.code(["all"]) == 1
    untested = Report({}, [Verdict(name, because="no") for name in PROPERTIES])
    assert untested.code(["run-to-run"]) == 3
    only_logits = Verdict("run-to-run")
    only_logits.add(0, "twice", arms.Difference(0, None, None, None, 0.1, 1.0))
    assert only_logits.state == TOKENS
    assert Report({}, [only_logits]).code(["run-to-run"]) == 1
    assert Report({}, [only_logits]).code(["run-to-run:tokens"]) == 0
    with pytest.raises(BadSetting, match="no property 'speed'"):
        twin_rows.code(["speed"])


def test_everything_of_a_live_model_is_as_before_and_a_fresh_process_cannot_be_asked() -> None:
    model = models.llama()
    model.generation_config.use_cache = None
    threads, attention, own = (
        torch.get_num_threads(),
        model.config._attn_implementation,
        model.generation_config.to_dict(),
    )
    states, held = seeds.states(), switches.snapshot(torch)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = probe(model, models.letters(), ["bcd", "hello there"], **SMALL, steady=True)
    assert (torch.get_num_threads(), model.config._attn_implementation) == (threads, attention)
    assert model.generation_config.to_dict() == own
    assert switches.snapshot(torch) == held
    assert torch.equal(seeds.states()["cpu"], states["cpu"])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    for name in ("across-processes", "cold-and-warm"):
        assert found[name].state == UNTESTED
        assert "module:function" in found[name].because
    assert found["run-to-run"].state == HOLDS
    assert found.about["deterministic"].startswith("on")


def test_a_model_that_draws_is_found_out_and_nothing_else_is_claimed_of_it() -> None:
    """Dropout left on: repeats differ, and whatever else differs cannot be told from that."""
    model = models.llama(attention_dropout=0.5)
    model.train()
    found = probe(model, None, PROMPTS, **SMALL)
    assert found["run-to-run"].state in (BROKEN, TOKENS)
    told = [item for item in found.verdicts if item.because == probes.REPEATS]
    assert len(told) >= 4
    assert model.training


def test_what_a_model_cannot_do_is_not_tested_and_says_why() -> None:
    model = models.gpt2()

    def refuse(implementation: str) -> None:
        raise ValueError(f"no {implementation} here")

    model.set_attn_implementation = refuse
    plain = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache") is False:
            raise NotImplementedError("this model has no such cache")
        return plain(*args, **kwargs)

    model.generate = generate
    found = probe(model, None, PROMPTS, **SMALL)
    assert (found["attention-invariant"].state, found["attention-invariant"].because) == (UNTESTED, "no eager here")
    assert found["cache-invariant"].because == "NotImplementedError: this model has no such cache"
    assert found["run-to-run"].state == HOLDS
    assert found["padding-invariant"].prompts == {0, 1, 2}


def test_an_encoder_and_decoder_is_probed_too() -> None:
    found = probe(models.t5(), None, PROMPTS, **SMALL)
    assert found["run-to-run"].state == HOLDS
    assert found["batch-invariant"].prompts == {0, 1, 2}


def test_a_model_that_cannot_be_asked_is_one_sentence() -> None:
    with pytest.raises(UsageError, match="has no generate"):
        probe(torch.nn.Linear(2, 2))
    model = models.llama()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory\nand more")

    model.generate = broken
    with pytest.raises(UsageError, match=r"cannot be asked: RuntimeError: out of memory\.$"):
        probe(model, None, PROMPTS, **SMALL)
    with pytest.raises(BadSetting, match="2 rows and 1 token"):
        probe(models.llama(), batch=1)
    with pytest.raises(BadSetting, match="rows"):
        probe(models.llama(), rows=1)


# -- loading and prompts ----------------------------------------------------------------------------


def test_a_checkpoint_is_loaded_from_its_folder_as_it_was_saved(tmp_path: Path) -> None:
    model = models.llama().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    loaded, tokenizer = arms.load(str(tmp_path / "m"))
    assert loaded.dtype == torch.bfloat16
    assert not loaded.training
    assert tokenizer is None
    models.letters().save_pretrained(tmp_path / "m")
    assert arms.load(str(tmp_path / "m"))[1]("b")["input_ids"] == [5]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/no/such", "there is no folder"),
        ("provenance.cli.models:nothing", "has no function nothing"),
        ("no_such_module:make", "cannot be imported"),
        ("string:capwords", "raised TypeError"),
        ("os:getcwd", "has no generate"),
        (__file__, "is a file"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(target: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        arms.load(target)


def test_a_damaged_checkpoint_is_said_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadFile, match=r"cannot be loaded: [^\n]+\.$"):
        arms.load(str(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadFile, match=r"no config\.json"):
        probe(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("p.txt", "one\n\ntwo\n", ["one", "two"]), ("p.json", '["a", [1, 2]]', ["a", [1, 2]])],
)
def test_prompts_come_from_lines_or_from_json(name: str, text: str, expected: list[Any], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert arms.read(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.txt", "\n", "holds no prompt"),
        ("p.json", "{", "is not JSON"),
        ("p.json", "[1]", "a list of texts"),
        ("q.txt", None, "no file"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(name: str, text: str | None, said: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(BadFile, match=said):
        arms.read(tmp_path / name)


def test_prompts_are_checked_before_they_are_asked() -> None:
    model = models.llama()
    assert len(arms.tokenized(None, model, None)) == 8
    assert max(map(max, arms.tokenized(None, model, None))) < models.VOCABULARY
    assert arms.tokenized(["bc"], model, models.letters()) == [[5, 6]]
    for prompts, said in (
        (["bc"], "no tokenizer"),
        ([[64]], "outside of the model's 64"),
        ([[]], "give a text"),
        ([], "no prompt"),
    ):
        with pytest.raises(UsageError, match=said):
            arms.tokenized(prompts, model, None)


def test_a_fresh_process_that_fails_is_told_with_its_last_word(tmp_path: Path) -> None:
    plan = {"batch": 2, "tokens": 2, "steady": False, "record": False, "device": ""}
    said = fresh.ask("no_such_module:make", None, plan, tmp_path)
    assert (
        said
        == "the fresh process ended with 2: no_such_module:make cannot be imported: No module named 'no_such_module'."
    )
    assert fresh.read(tmp_path, "0") is None


# -- the command, and what is recorded --------------------------------------------------------------


def test_the_command_probes_a_folder_and_records_nothing_unless_asked(
    command: Command, tmp_path: Path, db: Path
) -> None:
    models.llama().save_pretrained(tmp_path / "m")
    (tmp_path / "p.json").write_text(json.dumps(PROMPTS[:2]))
    given = (
        "probe",
        "determinism",
        str(tmp_path / "m"),
        "--prompts",
        str(tmp_path / "p.json"),
        "--tokens",
        "3",
        "--batch",
        "2",
    )
    said = command(*given, "--require", "run-to-run,across-processes")
    assert said.returncode == 0, said.stderr
    assert "across-processes     holds (2 of 2 prompts, bit for bit)" in said.stdout
    assert said.stderr == ""
    assert not db.exists()
    told = command(*given, "--record", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["about"]["prompts"] == 2
    runs = models.stored(db)
    assert len(runs) > 20
    assert {run.tags.get("probe") for run in runs} == {"determinism"}
    with sqlite3.connect(db) as connection:  # this process, and the fresh one
        assert connection.execute("select count(distinct stream) from runs").fetchone() == (2,)


def test_a_recorded_model_stays_recorded_under_a_tag(db: Path) -> None:
    provenance.init(db=db, writer="off")
    model = provenance.wrap(models.llama())
    probe(model, None, PROMPTS[:1], **SMALL)
    model.generate(models.tensor(), max_new_tokens=2)
    tags = [run.tags for run in models.runs(db)]
    assert tags[-1] == {}
    assert {tuple(item.items()) for item in tags[:-1]} == {(("probe", "determinism"),)}


@pytest.mark.parametrize("target", ["nowhere", "provenance.cli.models:nope"])
def test_a_slip_is_one_sentence_and_exit_code_2(command: Command, target: str) -> None:
    said = command("probe", "determinism", target)
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
