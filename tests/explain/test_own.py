"""Fields of a caller's own: named with little confidence, and never an explanation alone; what is allowed beside them."""

from typing import Any

import pytest

from provenance.explain import compare, own, page, reports, story
from provenance.explain.history import Counts, Evidence
from provenance.replay import verdict
from tests.explain.test_compare import pair
from tests.fakes.runs import run, unknown

FAR: dict[str, Any] = {"moved": 9.0, "margin": 3.0}


def answer(a: dict[str, Any], b: dict[str, Any], history: Any = None, **more: Any) -> dict[str, Any]:
    return compare.compare(*pair(a, b, **(more or FAR)), history=history)


def past(name: str, *counts: int, q: float = 0.9) -> dict[str, Evidence]:
    return {name: Evidence(Counts(*counts), 0.5, q)}


def test_a_field_of_ones_own_alone_explains_nothing() -> None:
    found = answer({"engine.kv": 4}, {"engine.kv": 8})
    (cause,) = found["causes"]
    assert (cause["field"], cause["effect"]) == ("engine.kv", "unknown")
    assert 0.1 < cause["confidence"] <= own.ALL
    assert cause["because"] == "a field of your own: whether it acts on an output is not known"
    assert (found["explained"], found["verdict"], found["pairs"][0]["explained"]) == (False, "divergent", False)
    assert found["advice"][0].startswith("Unexplained: something that decides was not recorded")
    assert found["advice"][-1].startswith("Whether engine.kv acts on an output, only a run can tell: ")
    assert not any("one value everywhere" in line for line in found["advice"])
    text = "\n".join(line for _, line in story.lines(found))
    assert "No recorded difference explains it." in text
    assert "[effect unknown, confidence 0.23]" in text
    assert "Likely cause" not in text
    html = page.page(found, *pair({"engine.kv": 4}, {"engine.kv": 8}, **FAR))
    assert story.OWN in html
    assert "No recorded difference explains it." in html


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("request.id", "q1", "q2"), ("my.request_id", 1, 2), ("time.now", 1, 2), ("my.at", 1.7e9, 1.8e9),
        ("my.key", "0190b7a2-0000-7000-8000-00000000000a", "0190b7a2-0000-7000-8000-00000000000b"),
        ("my.key", "20260101", "20260102"), ("my.day", "2026-01-01T00:00", "2026-01-02T00:00"),
    ],
)  # fmt: skip
def test_what_looks_like_an_identifier_is_believed_less_and_worth_no_run(name: str, a: object, b: object) -> None:
    (cause,) = (found := answer({name: a}, {name: b}))["causes"]
    assert cause["confidence"] < 0.1
    assert cause["because"].endswith("is not known, and it looks like an identifier")
    assert not any("only a run can tell" in line for line in found["advice"])


@pytest.mark.parametrize(("a", "b"), [("v1", "v2"), (4, 8), (True, False), ("deadbeef", 1), ([1], [2])])
def test_a_setting_does_not_look_like_one(a: object, b: object) -> None:
    assert not own.looks("engine.kv", a, b)


def test_however_many_there_are_they_are_believed_no_further_together() -> None:
    names = [f"engine.n{number}" for number in range(12)]
    found = answer(dict.fromkeys(names, 1), dict.fromkeys(names, 2))
    assert len(found["causes"]) == 12
    assert 0.1 < sum(cause["confidence"] for cause in found["causes"]) <= own.ALL + 1e-9
    assert found["causes"][0]["alternatives"]


def test_one_that_differed_in_every_pair_on_record_goes_with_anything() -> None:
    (cause,) = answer({"my.x": 1}, {"my.x": 2}, past("my.x", 1, 2, 0, 0))["causes"]
    assert cause["because"].endswith("and it differed in every pair of runs on record")
    assert cause["confidence"] < 0.1
    for counts in ((1, 1, 0, 0), (1, 2, 1, 0)):  # too few to say, and one pair in which it agreed
        (cause,) = answer({"my.x": 1}, {"my.x": 2}, past("my.x", *counts))["causes"]
        assert cause["because"].endswith("is not known")


def test_a_past_that_accuses_one_makes_a_suspect_of_it_like_any_other() -> None:
    found = answer({"engine.kv": 4}, {"engine.kv": 8}, past("engine.kv", 9, 1, 1, 9, q=0.01))
    (cause,) = found["causes"]
    assert (cause["effect"], found["explained"], found["pairs"][0]["deciding"]) == ("semantic", True, ["engine.kv"])
    assert cause["confidence"] > own.ALL
    assert reports.settle(found, None, lambda name: name == "engine.kv") == 0


def test_it_stands_behind_whatever_is_known_to_act() -> None:
    """Threads hardly explain logits that moved so far, and yet it is known what they do."""
    known = (
        {"generation.repetition_penalty": 1.0, "engine.kv": 4},
        {"generation.repetition_penalty": 1.3, "engine.kv": 8},
    )
    found = answer(*known, moved=0.0)
    assert [cause["field"] for cause in found["causes"]] == ["generation.repetition_penalty", "engine.kv"]
    assert [cause["alternatives"] for cause in found["causes"]] == [[], []]
    text = "\n".join(line for _, line in story.lines(found))
    assert text.index("Likely cause\n") < text.index(story.OWN)
    weak = {"generation.num_beams": 1, "engine.kv": 4}, {"generation.num_beams": 2, "engine.kv": 8}
    assert answer(*weak, moved=0.125)["causes"][-1]["field"] == "engine.kv"


def test_to_allow_one_excuses_nothing() -> None:
    found = answer({"request.id": "q1"}, {"request.id": "q2"})
    assert reports.settle(found, None, lambda _: True) == 1
    assert (found["causes"][0]["allowed"], found["pairs"][0]["allowed"]) == (True, False)
    assert reports.sentence(reports.cases(found)[0]).endswith("No recorded difference explains it.")


def test_every_cause_that_matters_must_be_allowed_and_no_remainder() -> None:
    a = {"generation.repetition_penalty": 1.0, "request.id": "q1"}
    b = {"generation.repetition_penalty": 1.3, "request.id": "q2"}
    found = answer(a, b, moved=0.0)
    assert found["pairs"][0]["deciding"] == ["generation.repetition_penalty"]
    assert reports.settle(found, None, lambda name: name == "generation.repetition_penalty") == 0
    assert reports.settle(found, None, lambda _: True) == 0
    assert reports.settle(found, None, lambda name: name == "request.id") == 1
    assert "generation.repetition_penalty" in reports.sentence(reports.cases(found)[0])
    two = {"cpu.capability": "AVX2", "model.attn_implementation": "sdpa"}
    other = {"cpu.capability": "DEFAULT", "model.attn_implementation": "eager"}
    found = answer(two, other, moved=0.125)
    assert set(found["pairs"][0]["deciding"]) == {"cpu.capability", "model.attn_implementation"}
    assert reports.settle(found, None, lambda name: name == "cpu.capability") == 1
    assert reports.settle(found, None, lambda _: True) == 0


def test_a_cause_of_little_confidence_is_a_remainder() -> None:
    causes = [
        {"field": name, "effect": "numeric", "confidence": confidence, "alternatives": []}
        for name, confidence in (("a.b", 0.8), ("c.d", 0.1), ("e.f", 0.09))
    ]
    assert own.deciding(causes) == ["a.b", "c.d"]
    assert own.deciding([]) == []


def meant(name: str, a: dict[str, Any], b: dict[str, Any], **more: Any) -> dict[str, Any]:
    return compare.compare(*pair(a, b, **more), declared=lambda field: field == name)


def test_what_was_declared_explains_where_nothing_else_does() -> None:
    one, other = (
        run([[5, 6]], fields={"generation.max_new_tokens": 2}),
        run([[5]], fields={"generation.max_new_tokens": 1}),
    )
    found = compare.compare(one, other, declared=lambda name: name == "generation.max_new_tokens")
    assert (found["causes"], found["explained"], found["verdict"]) == ([], True, "divergent")
    assert found["declared"] == [{"field": "generation.max_new_tokens", "a": 2, "b": 1, "explains": True}]
    (advice,) = found["advice"]
    assert advice.startswith("The declared difference explains it: generation.max_new_tokens. `--allow` in place of")
    assert ("head", "The declared difference explains it: generation.max_new_tokens.") in story.lines(found)
    assert reports.settle(found, None, lambda _: True) == 1
    assert reports.sentence(reports.cases(found)[0]).endswith("The declared difference explains it.")
    assert verdict.told(found).endswith("; the declared difference explains it: generation.max_new_tokens")


def test_what_was_declared_explains_nothing_that_it_cannot_have_done() -> None:
    found = meant("torch.num_threads", {"torch.num_threads": 1}, {"torch.num_threads": 7}, **FAR)
    assert (found["explained"], "explains" in found["declared"][0]) == (False, False)
    assert found["advice"][0].startswith("Unexplained: ")
    found = meant("request.id", {"request.id": "q1"}, {"request.id": "q2"}, **FAR)
    assert not found["explained"]
    lost = {"weights.loaded_root": unknown("weights.loaded_root")}
    found = meant("model.sliding_window", {"model.sliding_window": 1} | lost, {"model.sliding_window": 2}, **FAR)
    assert (found["explained"], found["verdict"]) == (False, "inconclusive")


def test_an_input_that_was_meant_to_differ_is_listed_too() -> None:
    one, other = run([[5]], [[1, 2]]), run([[6]], [[1, 3]])
    found = compare.compare(one, other, declared=lambda name: name == "input.token_ids")
    assert found["declared"] == [{"field": "input.token_ids", "a": 2, "b": 3, "explains": True}]
