"""Recorded functions: arguments in place of token ids; and calls that did not end well, which say how they ended."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.explain import calls, compare, page, reports, story
from provenance.facts import Field, Run, Sequence
from provenance.integrity.values import Cut
from tests.explain.test_compare import pair
from tests.fakes.runs import key, run, unknown

LONE = Field.unknown("torch.version", "torch is not loaded")


def function(value: Any, result: Any, fields: dict[str, Any] | None = None, **more: Any) -> Run:
    """Make a call of a recorded function in a process without torch."""
    table = {name: Field.unknown(name, LONE.reason) for name in ("torch.version", "cublas.version")}
    table |= {"gpu.driver_version": unknown("gpu.driver_version")}
    table |= {name: Field(name, item) for name, item in (fields or {}).items()}
    one = Sequence(
        0, 0, key("in", [repr(value)]), key("out", [repr(result)]), input_value=value, output_value=result,
        finish="returned",
    )  # fmt: skip
    facts: dict[str, Any] = {"run_id": "r", "kind": "call", "runtime": "function", "operation": "gen", "status": "ok",
                             "started_at": 1, "duration_ns": 1, "key_id": "0b"}  # fmt: skip
    return Run(fields=table, sequences=(one,), **(facts | more))


def given(*args: Any, **kwargs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"args": args}
    return found | ({"kwargs": kwargs} if kwargs else {})


def text(answer: dict[str, Any]) -> str:
    return "\n".join(line for _, line in story.lines(answer))


def test_the_argument_that_differs_is_the_cause_and_is_named() -> None:
    found = compare.compare(function(given("hi"), "hi"), function(given("hi", temperature=0.9), "ih"))
    assert found["inputs"]["first_difference"] == {"path": "kwargs.temperature", "a": {"state": "unset"}, "b": 0.9}
    (cause,) = found["causes"]
    assert (cause["field"], cause["b"], cause["try"]) == ("input.arguments", 0.9, None)
    assert cause["because"] == "the arguments differ: kwargs.temperature"
    assert cause["confidence"] > 0.9
    assert (found["verdict"], found["layer"], found["explained"]) == ("not_comparable", "prompt", True)
    told = text(found)
    assert told.startswith("Not comparable: the arguments differ.")
    assert "The arguments part at kwargs.temperature: (unset) in A, 0.9 in B." in told
    for word in ("token id", "tokenizer", "template", "replay", "torch", "cublas", "gpu."):
        assert word not in told, word
    assert found["advice"][0].endswith("twice with equal arguments: kwargs.temperature differed.")


@pytest.mark.parametrize(
    ("a", "b", "path"),
    [
        (given("x"), given("y"), "args[0]"), (given(1), given(True), "args[0]"), (given(1), given(1, 2), "args[1]"),
        (given(m=[{"role": "a", "text": "b"}]), given(m=[{"role": "a", "text": "c"}]), "kwargs.m[0].text"),
        (given({"a b": 1}), given({"a b": None}), "args[0]['a b']"), (given([1]), given((1,)), "args[0]"),
        (given(1.5), given(float("nan")), "args[0]"), ("odd", given(1), ""),
    ],
)  # fmt: skip
def test_the_path_leads_to_what_differs(a: Any, b: Any, path: str) -> None:
    (found,) = calls.parted(function(a, 1).sequences[0], function(b, 1).sequences[0])
    assert found.path == path


def test_several_arguments_are_told_and_those_that_were_not_kept_are_not() -> None:
    found = compare.compare(function(given(1, 2, 3, 4), "a"), function(given(5, 6, 7, 8), "b"))
    assert found["causes"][0]["because"] == "the arguments differ: args[0], args[1], args[2], args[3]"
    assert "args[0], args[1], args[2] and others differed" in found["advice"][0]
    two = compare.compare(function(given(1, 2), "a"), function(given(5, 6), "b"))
    assert two["advice"][0].endswith("args[0], args[1] differed.")
    one, other = (
        replace(item, sequences=(replace(item.sequences[0], input_value=None, output_value=None),))
        for item in (function(given(1), "a"), function(given(2), "b"))
    )
    found = compare.compare(one, other)
    assert (found["inputs"]["first_difference"], found["inputs"]["equal"]) == (None, False)
    assert found["causes"][0]["because"] == "the arguments differ, by their keys"
    assert found["advice"] == ["To compare what the function does, call it twice with equal arguments."]


def test_values_tell_where_no_key_does_and_objects_of_which_the_type_alone_is_known_do_not() -> None:
    one, other = function(given(1), "a"), function(given(1), "b", key_id="0c")
    found = compare.compare(one, other)
    assert (found["inputs"]["equal"], found["verdict"], found["layer"]) == (True, "divergent", None)
    held = given({"k": [Cut("app.Client")]}, "x")
    found = compare.compare(function(held, "a"), function(held, "b"))
    assert (found["inputs"]["equal"], found["verdict"]) == (None, "inconclusive")
    (item,) = [item for item in found["unknown"] if item["would_decide"]]
    assert item == {
        "field": "input.arguments", "because": "of the arguments of type app.Client nothing but the type was kept",
        "would_decide": True,
    }  # fmt: skip
    assert compare.compare(function(held, "a"), function(held, "a"))["verdict"] == "same"
    known = given(Cut("app.Client", "Client(1)"))
    assert compare.compare(function(known, "a"), function(known, "a"))["inputs"]["equal"]
    unkept = replace(one, sequences=(replace(one.sequences[0], input_value=None),))
    assert compare.compare(unkept, other)["inputs"]["equal"] is None


def test_equal_arguments_and_another_result_are_the_work_of_what_is_no_argument() -> None:
    """A process without torch names nothing of torch's."""
    found = compare.compare(function(given("x"), "a"), function(given("x"), "b"))
    (said,) = found["advice"]
    assert said.startswith(
        "Unexplained: something that decides was not recorded. A function can read what is no argument"
    )
    assert found["unknown"] == []
    assert found["outputs"]["no_evidence"] == "a function has arguments and a result, and no tokens"
    fields: tuple[dict[str, Any], ...] = ({"lib.numpy.version": "1", "engine.kv": 4}, {"lib.numpy.version": "2"})
    one, other = (function(given("x"), result, item) for result, item in zip("ab", fields, strict=True))
    found = compare.compare(one, other)
    assert found["causes"][0]["field"] == "lib.numpy.version"
    assert "To prove it, make A's call again with lib.numpy.version as in B" in found["advice"][1]


def test_arguments_out_of_which_a_secret_was_taken_equal_none() -> None:
    one = function(given("x"), "a", {"input.arguments": 1})
    taken = replace(
        one,
        fields={**one.fields, "input.arguments": unknown("input.arguments", "a secret was taken out of the arguments")},
    )
    other = function(given("x"), "b")
    blank = replace(other, sequences=(replace(other.sequences[0], input_key="", input_value=None),))
    found = compare.compare(taken, blank)
    assert found["verdict"] == "inconclusive"
    (item,) = [item for item in found["unknown"] if item["would_decide"]]
    assert item["because"] == "a secret was taken out of the arguments of A"


def test_torch_that_one_process_alone_had_loaded_is_no_blank() -> None:
    one = function(given("x"), "a", {"torch.version": "2.13.0"})
    found = compare.compare(one, function(given("x"), "b"))
    assert "torch.version" in {item["field"] for item in found["unknown"]}


def test_a_result_that_differs_by_white_space_differs_on_the_surface() -> None:
    found = compare.compare(function(given("x"), "a  b"), function(given("x"), "a b"))
    assert found["outputs"]["surface_only"]
    assert "The outputs part on the surface only." in text(found)
    foreign = compare.compare(function(given("x"), "a  b"), function(given("x"), "a b", key_id="0c"))
    assert (foreign["outputs"]["surface_only"], foreign["verdict"]) == (True, "divergent")
    assert not compare.compare(function(given("x"), "a"), function(given("x"), "b"))["outputs"]["surface_only"]


# -- how calls ended ----------------------------------------------------------------------------------


def raised(error: str = "RuntimeError: client\nwent away") -> Run:
    one = run(status="error", error=error)
    lost = replace(one.sequences[0], output_ids=None, output_key="", steps=(), finish="unknown", logits_dtype="")
    fields = {name: item for name, item in one.fields.items() if name not in ("rng.consumed", "weights.loaded_root")}
    return replace(one, sequences=(lost,), fields=fields)


def test_a_call_that_raised_is_named_with_what_it_raised() -> None:
    found = compare.compare(run(), raised())
    assert (found["verdict"], found["explained"]) == ("inconclusive", False)
    assert found["endings"] == {
        "a": "ok", "b": "error", "told": "B raised RuntimeError: client went away", "decides": True,
    }  # fmt: skip
    assert text(found).startswith("Could not tell: B raised RuntimeError: client went away.")
    assert "No recorded difference" not in text(found)
    assert found["unknown"]
    assert not any(item["would_decide"] for item in found["unknown"])
    assert found["advice"] == [
        "B raised RuntimeError: client went away: mend that first, make that call again, then compare."
    ]
    assert "Likely cause" not in page.page(found, run(), raised())
    both = compare.compare(raised(""), raised("ValueError"))
    assert both["advice"][0].startswith(
        "A raised an exception of which nothing was kept and B raised ValueError: mend that first, make both calls again"
    )


@pytest.mark.parametrize(
    ("status", "finish", "said"),
    [
        ("error", "length", "raised boom"), ("aborted", "length", "was aborted"), ("ok", "cut", "was cut short"),
        ("abandoned", "cut", "was given up half way"), ("crashed", "length", "was cut off when its process ended"),
        ("running", "unknown", "has not ended"), ("partial", "length", "was recorded in part"),
    ],
)  # fmt: skip
def test_equal_outputs_of_a_call_that_ended_badly_are_not_the_same(status: str, finish: str, said: str) -> None:
    other = run(status=status, error="boom")
    other = replace(other, sequences=(replace(other.sequences[0], finish=finish),))
    found = compare.compare(run(), other)
    assert (found["verdict"], reports.settle(found)) == ("inconclusive", 3)
    assert text(found).startswith(f"Could not tell: B {said}; what both put out is equal.")
    assert compare.compare(other, other)["verdict"] == "same"
    assert f"Note that A {said} and B {said}." in text(compare.compare(other, other))


@pytest.mark.parametrize("turned", [False, True])
def test_an_output_that_ends_where_its_call_did_says_nothing_of_the_rest(turned: bool) -> None:
    whole, short = run([[5, 6, 7]]), run([[5, 6]], status="aborted")
    found = compare.compare(short, whole) if turned else compare.compare(whole, short)
    assert (found["verdict"], found["explained"]) == ("inconclusive", False)
    assert f"Could not tell: {'A' if turned else 'B'} was aborted." in text(found)
    longer = compare.compare(run([[5, 6]]), run([[5, 6, 7]], status="aborted"))
    assert longer["verdict"] == "divergent"
    capped = run([[5, 6]], status="aborted", fields={"generation.max_new_tokens": 2})
    assert compare.compare(whole, capped)["verdict"] == "divergent"


# -- what no field holds ------------------------------------------------------------------------------


def test_what_no_reader_sees_is_named_where_logits_moved() -> None:
    said = compare.compare(*pair({"request.id": "q1"}, {"request.id": "q2"}, moved=9.0, margin=3.0))["advice"][0]
    assert (
        "the likeliest are an edit of the weights through .data after they were hashed, position ids given to" in said
    )
    assert "request.id" not in said
    assert ".data" not in compare.compare(*pair(moved=0.0, margin=3.0))["advice"][0]


def test_position_ids_that_one_call_was_given_are_the_cause() -> None:
    a, b = pair(moved=9.0, margin=3.0)

    def beside(line: str) -> Run:
        return replace(
            b, sequences=(replace(b.sequences[0], media=(line, "token_type_ids torch.int64 (4,) sha256:1")),)
        )

    found = compare.compare(a, beside("position_ids torch.int64 (4,) sha256:ab"))
    assert [cause["field"] for cause in found["causes"]] == ["batch.position_ids_sha256"]
    assert found["causes"][0]["a"] == {"state": "unset"}
    found = compare.compare(a, beside("position_ids torch.int64 (4,) not digested: too large"))
    assert "batch.position_ids_sha256" in {item["field"] for item in found["unknown"]}


def test_why_arguments_cannot_be_compared_is_what_their_record_says() -> None:
    """A lock among them is no secret that was taken out."""
    why = "the arguments hold something of type _thread.lock, which cannot be kept"
    one, other = (function(given("x", Cut("_thread.lock")), result) for result in "ab")
    held = {**other.fields, "input.arguments": Field.unknown("input.arguments", why)}
    found = compare.compare(one, replace(other, fields=held))
    assert (found["verdict"], found["inputs"]["equal"]) == ("inconclusive", None)
    assert {"field": "input.arguments", "because": f"{why} of B", "would_decide": True} in found["unknown"]
