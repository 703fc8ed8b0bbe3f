"""A regression set: a file that survives git and another machine, and a check that counts what it can tell."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import provenance
from provenance.errors import BadFile
from provenance.explain.history import wilson
from provenance.facts import Run
from provenance.replay import baseline, load
from provenance.replay.plan import ASKED, NEEDED, Lost
from provenance.replay.rerun import Rerun
from provenance.replay.verdict import Policy, Result, judge, named
from provenance.store import export
from tests.explain.test_compare import pair
from tests.fakes import models
from tests.fakes.runs import run
from tests.replay.test_rerun import CALLS, one_ulp, record, save

FEW = ("left", "sampled", "a configuration")


@pytest.fixture
def recorded(tmp_path: Path, db: Path) -> list[Run]:
    folder = save(tmp_path / "ck")
    return [record(folder, db, CALLS[name]) for name in FEW]


def write(path: Path, runs: list[Run]) -> baseline.Baseline:
    path.write_text(baseline.dumps(path.name.removesuffix(baseline.SUFFIX), runs))
    return baseline.read(str(path))


def test_what_is_read_is_what_was_frozen(recorded: list[Run], tmp_path: Path) -> None:
    held = write(tmp_path / "set.baseline.json", recorded)
    assert held.name == "set"
    for one, other in zip(recorded, held.runs, strict=True):
        assert export.dumps(one) == export.dumps(other)
        assert one.states == other.states
    assert baseline.dumps("set", list(held.runs)) == held.path.read_text()
    assert [r.run_id for r in export.read_runs(held.path)] == [r.run_id for r in recorded]  # as `diff` reads it


def test_fields_that_all_share_stand_once_and_a_token_is_a_line(recorded: list[Run], tmp_path: Path) -> None:
    text = write(tmp_path / "set.baseline.json", recorded).path.read_text()
    assert text.count('"torch.version"') == 1
    assert text.count('"generation.mode"') == 3
    first = recorded[0].sequences[0].steps[0]
    assert sum(line.strip().startswith(f"[{first.token}, [{first.top_ids[0]}, ") for line in text.splitlines()) >= 1
    assert max(len(line) for line in text.splitlines() if "rng.torch_cpu" not in line) < 400


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text.replace('"output_ids": [', '"output_ids": [9, ', 1), "is damaged|not as it was written"),
        (lambda text: text.replace('"nightly"', '"other"'), ""),
        (lambda text: text.replace('{"value": "bfloat16"}', '{"value": "float16"}', 1), "not as it was written"),
        (lambda text: text.replace("provenance/baseline/1", "provenance/baseline/9"), "is not an exported run|is no baseline"),
        (lambda text: text.replace('"baseline": {', '"nobody": {'), "is no baseline"),
        (lambda text: text[: len(text) // 2], "is not JSON"),
        (lambda text: "[]", "is no baseline"),
    ],
)  # fmt: skip
def test_a_set_that_somebody_changed_is_refused(damage: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "nightly.baseline.json", [run(), run(outputs=((7, 8),))]).path
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    if not said:  # a name binds nothing
        assert baseline.read(str(path)).name == "nightly"
        return
    with pytest.raises(BadFile, match=said):
        baseline.read(str(path))


@pytest.mark.parametrize("shared", [[], 7, "x", {"os.x": 7}, {"os.x": {"value": {"float": "zz"}}}])
def test_common_fields_of_anybody_are_held_to_their_kind(shared: object, tmp_path: Path) -> None:
    form = {"schema": export.BASELINE, "baseline": {}, "fields": shared, "runs": [json.loads(export.dumps(run()))]}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(form))
    if shared == []:
        assert len(export.read_runs(path)) == 1
        return
    with pytest.raises(BadFile, match="is damaged"):
        export.read_runs(path)


def test_there_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="there is no baseline at"):
        baseline.read(str(tmp_path / "none"))


# -- what is frozen ---------------------------------------------------------------------------------


def test_of_calls_made_twice_the_newest_stands(recorded: list[Run]) -> None:
    first = recorded[0]
    later = replace(first, run_id="f" + first.run_id[1:], started_at=first.started_at + 1)
    kept, told = baseline.distinct([later, *recorded])
    assert [item.run_id for item in kept if item.sequences[0].input_key == first.sequences[0].input_key][:1] == [
        later.run_id
    ]
    assert len(kept) == 3
    assert [" is the same call as " in text for text in told] == [True]
    moved = replace(later, sequences=(replace(later.sequences[0], output_ids=(1,)), *later.sequences[1:]))
    assert "with ANOTHER output" in baseline.distinct([first, moved])[1][0]
    drawn = replace(recorded[1], states={"rng.torch_cpu": b"other"}, run_id=later.run_id)
    assert len(baseline.distinct([recorded[1], drawn])[0]) == 2  # another draw is another call


def test_it_is_said_which_runs_do_not_fit() -> None:
    kept = run(fields={"batch.mask_given": True})
    assert baseline.fit(kept) == ("", [])
    coded = run(fields={"generation.logits_processor": ["a.B"]})
    assert baseline.fit(coded)[1][0].startswith("generation.logits_processor: the processors of the caller's own")
    lost = replace(kept, sequences=(replace(kept.sequences[0], input_ids=None),))
    assert "cannot be replayed: input.token_ids: the inputs were not kept" in baseline.fit(lost)[0]
    assert "only `generate` of transformers" in baseline.fit(replace(kept, runtime="vllm"))[0]


# -- checking ---------------------------------------------------------------------------------------


def test_a_set_of_two_models_is_checked_with_each_loaded_once(
    recorded: list[Run], tmp_path: Path, db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = record(save(tmp_path / "gpt2", models.gpt2()), db, CALLS["left"])
    held = write(tmp_path / "set.baseline.json", [*recorded, other])
    seen: list[str] = []
    real = load.load

    def counted(run: Run, source: Any) -> load.Loaded:
        seen.append(run.run_id)
        return real(run, source)

    monkeypatch.setattr(load, "load", counted)
    found = baseline.check(held, None, Policy())
    assert [result.verdict for result in found.results] == ["same"] * 4
    assert (found.code, found.counts()) == (0, (8, 8, 0, 0))
    assert found.rate == (0.0, *wilson(0, 8))
    assert seen == [recorded[0].run_id, other.run_id]
    form = found.document()
    assert (form["schema"], form["exit"], form["diverged"], form["rate"]) == ("provenance/baseline-check/1", 0, 0, 0.0)
    assert len({item["replay"] for item in form["runs"]}) == 4


def test_other_weights_bar_a_set_and_allowed_they_are_counted(recorded: list[Run], tmp_path: Path) -> None:
    held = write(tmp_path / "set.baseline.json", recorded)
    one_ulp(tmp_path / "ck")
    barred = baseline.check(held, None, Policy(), fail_over=1.0)
    assert (barred.code, barred.counts(), barred.rate) == (1, (5, 0, 0, 0), None)
    assert {result.verdict for result in barred.results} == {"not_comparable"}
    allowed = Policy(named(["weights"], held.runs))
    found = baseline.check(held, None, allowed)
    assert found.counts()[:2] == (5, 5)
    assert all(result.rerun.run is not None for result in found.results)


def test_a_set_from_elsewhere_needs_neither_store_nor_key(
    recorded: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is gone, the key is another, the machine knows nothing of the runs: ids decide."""
    held = write(tmp_path / "set.baseline.json", recorded)
    monkeypatch.setenv("PROVENANCE_KEY_FILE", str(tmp_path / "other" / "key"))
    provenance.init(db=tmp_path / "fresh" / "p.db", writer="off")
    found = baseline.check(held, None, Policy())
    assert found.code == 0
    assert {result.rerun.run.key_id for result in found.results if result.rerun.run} != {recorded[0].key_id}


def result(runs: tuple[Run, Run] | None, policy: Policy, lost: Lost | None = None) -> Result:
    """Judge a replay made by hand."""
    one, other = runs or (run(), run())
    refused = [lost] if lost is not None else []
    return judge(Rerun(one, run_id="r", run=None if refused else other, refused=refused, lost=refused), policy)


SAME, TIE, APART = (run(), run()), pair({"batch.size": 1}, {"batch.size": 8}), pair(moved=9.0, margin=3.0)
UNKNOWN = Lost("input.token_ids", "gone", NEEDED)
WEIGHTS = Lost("weights.loaded_root", "others", ASKED)


@pytest.mark.parametrize(
    ("runs", "losts", "policy", "fail_over", "code"),
    [
        ([SAME, SAME], [], Policy(), None, 0),
        ([SAME, TIE], [], Policy(), None, 1),
        ([SAME, TIE], [], Policy(failing={"divergent"}), None, 0),
        ([SAME, TIE], [], Policy(allowed=lambda name: name == "batch.size"), None, 0),
        ([SAME, APART], [], Policy(), None, 1),
        ([SAME, APART], [], Policy(), 0.5, 0),
        ([SAME, APART], [], Policy(), 0.49, 1),
        ([SAME, TIE, APART], [], Policy(failing={"divergent"}), 0.34, 0),
        ([SAME], [UNKNOWN], Policy(), None, 3),
        ([SAME], [UNKNOWN], Policy(), 0.9, 3),
        ([APART], [UNKNOWN], Policy(), None, 1),
        ([SAME], [WEIGHTS], Policy(), None, 1),
        ([SAME], [WEIGHTS], Policy(), 1.0, 1),
        ([SAME], [WEIGHTS], Policy(failing={"divergent"}), None, 0),
    ],
)  # fmt: skip
def test_the_exit_code(
    runs: list[tuple[Run, Run]], losts: list[Lost], policy: Policy, fail_over: float | None, code: int
) -> None:
    results = [result(item, policy) for item in runs] + [result(None, policy, lost) for lost in losts]
    assert baseline.Check("x", results, fail_over).code == code


def test_the_rate_counts_what_could_be_told() -> None:
    policy = Policy()
    results = [result(SAME, policy)] * 3 + [result(APART, policy), result(None, policy, UNKNOWN)]
    found = baseline.Check("x", results)
    assert found.counts() == (5, 4, 1, 1)
    assert found.rate == (0.25, *wilson(1, 4))


def test_each_sequence_is_a_case_for_ci() -> None:
    told = result(APART, Policy()).told()
    assert [(case.name, case.code, case.kind) for case in told] == [(f"{APART[0].run_id}:0", 1, "divergent")]
    assert "Divergent" in told[0].text
    refused = result(None, Policy(), UNKNOWN).told()
    assert [(case.code, case.kind) for case in refused] == [(3, "inconclusive")]
    assert "it was not run: input.token_ids: gone" in refused[0].message


def test_a_model_given_by_name_stands_for_all(recorded: list[Run], tmp_path: Path) -> None:
    held = write(tmp_path / "set.baseline.json", recorded)
    (tmp_path / "ck").rename(tmp_path / "moved")
    with pytest.raises(BadFile, match="there is no checkpoint at"):
        baseline.check(held, None, Policy())
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "moved")
    assert baseline.check(held, lambda: (model, models.letters()), Policy()).code == 0
