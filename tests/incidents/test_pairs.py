"""The pairs made of the public reports: what differs, what is shown, and that neither betrays the other."""

import random
from collections import Counter
from typing import Any

import orjson
import pytest

from provenance.catalogue import fields as catalogue
from provenance.catalogue.fields import spec
from provenance.explain import compare, conditions, tokens
from provenance.explain.fields import compare as differences
from provenance.explain.fields import of_sequence
from provenance.facts import Run, State
from provenance.store import export
from tests.incidents import evidence, homes, hosts, pairs, score, values
from tests.incidents.homes import Case

CASES = pairs.cases()


def differing(a: Run, b: Run, row: int = 0) -> set[str]:
    found, _ = differences(of_sequence(a, a.sequences[0]), of_sequence(b, b.sequences[row]))
    return {item.name for item in found}


def consequences(names: set[str]) -> set[str]:
    found = {item for name in names for item in values.FOLLOWS.get(name, ())}
    return found | {
        "batch.sequence_lengths",
        "batch.max_length",
        "batch.padding_tokens",
        "batch.padding_side",
        "batch.position",
    }


def test_every_case_whose_cause_is_known_is_there() -> None:
    assert len(CASES) == 75
    assert {case.confidence for case in CASES} == {"stated", "argued"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_deciding_fields_differ_and_twelve_that_can_do_nothing(case: Case) -> None:
    a, b, truth = pairs.make(case, 1)
    assert truth
    names = differing(a, b, score._row(a, b))
    assert set(truth) - {pairs.IDS} <= names
    for name in set(truth) - {pairs.IDS}:
        assert not conditions.moot(spec(name).active_when, a, b) or spec(name).effect == "none", name
    harmless = names - set(truth) - consequences(set(truth))
    assert len(harmless) >= pairs.HARMLESS
    for name in harmless - set(pairs.DRIFT):
        assert spec(name).effect == "none" or conditions.moot(spec(name).active_when, a, b), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_alone_the_first_differs_and_nothing_else_that_decides(case: Case) -> None:
    a, b, truth = pairs.make(case, 1, first=True)
    names = differing(a, b, score._row(a, b))
    others = set(pairs.deciding(case)) - set(truth) - consequences(set(truth)) - set(pairs.DRIFT)
    assert {name for name in others & names if spec(name).effect != "none"} == set()


def test_a_pair_is_the_same_each_time_and_another_with_another_seed() -> None:
    one, again, other = (
        orjson.dumps(pairs.documents(CASES[0], seed), option=orjson.OPT_NON_STR_KEYS) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_a_pair_is_an_exported_run() -> None:
    document, _, _ = pairs.documents(CASES[0], 3)
    assert export.document(export.read(document, "A")) == document


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_evidence_does_not_look_at_the_deciding_fields(case: Case) -> None:
    runtime = hosts.family(case, pairs.deciding(case))
    blank = case._replace(deciding=("torch.version",), canonical=(), id="x", source="x")
    assert evidence.kind(blank, runtime) == evidence.kind(case, runtime)


EXPECTED: dict[str, dict[str, Any]] = {
    "rounding": {"near_tie": True, "kind": "rounding"}, "settings": {"kind": "zero", "prefix": False},
    "sampled": {"kind": "zero", "prefix": False}, "length": {"kind": "zero", "prefix": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", sorted(EXPECTED))
def test_evidence_looks_as_it_was_measured(kind: str, dtype: str) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        shown = evidence.sequences(kind, dtype, with_logits=True, rng=rng)
        found = tokens.compare(shown.a, shown.b, sampled=kind == "sampled")
        assert found.ids_equal is False
        assert {name: getattr(found, name) for name in EXPECTED[kind]} == EXPECTED[kind]


@pytest.mark.parametrize("kind", sorted(evidence.KINDS))
def test_every_kind_parts_and_inputs_differ_where_it_says_so(kind: str) -> None:
    shown = evidence.sequences(kind, "bfloat16", with_logits=True, rng=random.Random(5))
    assert shown.a.output_key != shown.b.output_key
    assert (shown.a.input_key == shown.b.input_key) is (kind not in ("inputs", "media"))
    assert (shown.a.input_ids == shown.b.input_ids) is (kind != "inputs")


def test_medians_are_those_of_the_table() -> None:
    rng = random.Random(3)
    drawn = sorted(evidence._between((0.011, 1.9, 9.4), rng) for _ in range(4000))
    assert drawn[0] >= 0.011
    assert drawn[-1] <= 9.4
    assert 1.7 < drawn[2000] < 2.1


def test_what_is_taken_away_is_unknown_with_what_follows_from_it() -> None:
    case = next(case for case in CASES if "hardware.gpu.name" in case.deciding and "transformers" in case.runtime)
    a, _, _ = pairs.make(case, 1)
    bare = pairs.without(a, ["gpu.0.name"])
    assert bare.fields["gpu.0.name"].state is State.UNKNOWN
    assert bare.fields["gpu.0.multi_processor_count"].state is State.UNKNOWN
    assert bare.fields["torch.version"] == a.fields["torch.version"]
    assert pairs.without(a, ["batch.size"]).sequences[0].padding is None
    assert pairs.without(a, [pairs.IDS]).sequences[0].input_ids is None


# -- scoring ----------------------------------------------------------------------------------------


def test_a_true_field_counts_at_its_place_and_in_its_group() -> None:
    causes = [{"field": "a.b", "with": []}, {"field": "c.d", "with": ["e.f"]}]
    assert [score.place({"causes": causes}, truth) for truth in (["a.b"], ["e.f"], ["x.y"])] == [1, 2, 0]


def test_a_tally_counts_hits_and_what_confidence_was_worth() -> None:
    tally = score.Tally()
    tally.add(CASES[0], 1, {"field": "a.b", "confidence": 0.9})
    tally.add(CASES[0], 2, {"field": "c.d", "confidence": 0.5})
    tally.add(CASES[0], 0, None)
    assert (tally.pairs, tally.first, tally.third) == (3, 1, 2)
    assert tally.brier == pytest.approx(0.01 + 0.25 + 0.0)
    assert [row[:2] for row in tally.bins] == [[1, 0], [0, 0], [1, 0], [0, 0], [1, 1]]
    assert tally.misses[CASES[0].id] == Counter({"c.d": 1, "nothing": 1})


def test_shuffled_priors_are_put_back() -> None:
    before = {name: item.prior for name, item in catalogue.table().items()}
    with score.shuffled(1):
        dealt = {name: spec(name).prior for name in before}
        assert Counter(dealt.values()) == Counter(before.values())
        assert sum(dealt[name] != prior for name, prior in before.items()) > len(before) / 3
    assert {name: spec(name).prior for name in before} == before


def test_the_report_has_every_figure() -> None:
    text = score.report(1, verbose=True)
    for part in (
        "all deciding fields differ",
        "only the first differs",
        "priors shuffled",
        "deciding fields removed",
        "Brier",
        "0.8 to 1.0",
        "tokenizer_input",
    ):
        assert part in text


def test_another_set_of_reports_can_be_scored(tmp_path: Any) -> None:
    other = tmp_path / "other.jsonl"
    line = orjson.loads((homes.HERE / "cases.jsonl").read_bytes().splitlines()[0])
    line |= {
        "id": "another",
        "deciding_fields": ["torch.num_threads", "nobody.ever_heard_of"],
        "runtime": "pytorch (CPU)",
    }
    other.write_bytes(orjson.dumps(line))
    (case,) = pairs.cases(other)
    a, b, truth = pairs.make(case, 0)
    assert truth == ["torch.num_threads"]
    assert score.place(compare.compare(a, b), truth) == 1
    assert "nobody.ever_heard_of" in score.report(1, other)
