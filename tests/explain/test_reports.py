"""The answer for machines: exit codes with what is allowed and what fails, SARIF and JUnit in the forms CI reads."""

import json
import re
from dataclasses import replace
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree as ET

import pytest

from provenance.errors import BadSetting
from provenance.explain import compare, many, reports, story
from provenance.facts import Run, Sequence
from tests.explain.test_compare import pair
from tests.fakes.runs import run

TIE = pair({"batch.size": 1}, {"batch.size": 8})
APART = pair(moved=9.0, margin=3.0)
BARE = replace(run(), sequences=(Sequence(0, 0, input_key="k"),))
BOTH = pair({"batch.size": 1, "cpu.capability": "AVX2"}, {"batch.size": 8, "cpu.capability": "DEFAULT"})


def settled(runs: tuple[Run, Run], fail_on: set[str] | None = None, allow: str = "") -> tuple[dict[str, Any], int]:
    answer = compare.compare(*runs)
    return answer, reports.settle(answer, fail_on, lambda name: name == allow)


@pytest.mark.parametrize(
    ("runs", "fail_on", "allow", "code"),
    [
        ((run(), run()), None, "", 0), (TIE, None, "", 1), (APART, None, "", 1), ((BARE, BARE), None, "", 3),
        (TIE, {"divergent"}, "", 0), (APART, {"divergent"}, "", 1), ((BARE, BARE), {"divergent"}, "", 3),
        ((BARE, BARE), {"inconclusive"}, "", 1), ((run(), run()), {"same"}, "", 1),
        (TIE, None, "batch.size", 0), (TIE, {"near_tie"}, "batch.size", 0), (TIE, None, "batch.max_length", 1),
        (BOTH, None, "batch.size", 1), (APART, None, "batch.size", 1),
    ],
)  # fmt: skip
def test_the_exit_code(runs: tuple[Run, Run], fail_on: set[str] | None, allow: str, code: int) -> None:
    assert settled(runs, fail_on, allow)[1] == code


def test_what_is_allowed_is_marked() -> None:
    answer, _ = settled(TIE, allow="batch.size")
    assert answer["causes"][0]["allowed"]
    assert answer["pairs"][0]["allowed"]
    assert not settled(TIE)[0]["causes"][0]["allowed"]


def test_each_pair_of_a_batch_counts() -> None:
    """The first prompt parts by a near tie, the second diverges: failing on divergence sees the second."""
    first, second = TIE, APART
    a = replace(
        first[0],
        sequences=(first[0].sequences[0], replace(second[0].sequences[0], row=1, input_ids=(9,), input_key="i")),
    )
    b = replace(
        first[1],
        sequences=(first[1].sequences[0], replace(second[1].sequences[0], row=1, input_ids=(9,), input_key="i")),
    )
    answer = compare.compare(a, b)
    assert reports.settle(answer, {"divergent"}) == 1
    assert sorted(case.verdict for case in reports.cases(answer)) == ["divergent", "near_tie"]
    assert reports.settle(answer, {"not_comparable"}) == 0


def test_verdicts_are_read_and_a_wrong_one_is_refused() -> None:
    assert reports.verdicts("near_tie,divergent") == {"near_tie", "divergent"}
    with pytest.raises(BadSetting, match="there is no verdict 'diverged'; there are same, near_tie"):
        reports.verdicts("diverged")
    with pytest.raises(BadSetting, match="no verdict is named"):
        reports.verdicts(" , ")


# -- SARIF --------------------------------------------------------------------------------------------

# The keys that SARIF 2.1.0 allows in each object used here, and those it requires; the schema forbids all others.
ALLOWED = {
    "log": ({"$schema", "version", "runs", "inlineExternalProperties", "properties"}, {"version", "runs"}),
    "run": ({"tool", "results", "columnKind", "properties", "artifacts", "invocations", "originalUriBaseIds"}, {"tool"}),
    "tool": ({"driver", "extensions", "properties"}, {"driver"}),
    "driver": ({"name", "version", "informationUri", "rules", "semanticVersion", "fullName", "properties"}, {"name"}),
    "rule": ({"id", "name", "shortDescription", "fullDescription", "helpUri", "help", "defaultConfiguration", "properties"}, {"id"}),
    "result": ({"ruleId", "ruleIndex", "level", "kind", "message", "locations", "relatedLocations", "partialFingerprints",
                "properties"}, {"message"}),
    "location": ({"id", "physicalLocation", "logicalLocations", "message", "properties"}, set()),
}  # fmt: skip


def fits(kind: str, form: dict[str, Any]) -> None:
    allowed, required = ALLOWED[kind]
    assert required <= form.keys() <= allowed, (kind, form.keys())


@pytest.mark.parametrize(
    ("runs", "fail_on", "allow", "level", "kind"),
    [
        ((run(), run()), None, "", "none", "pass"), (TIE, None, "", "error", "fail"), ((BARE, BARE), None, "", "warning", "fail"),
        (TIE, None, "batch.size", "note", "fail"), (TIE, {"divergent"}, "", "note", "fail"), (APART, None, "", "error", "fail"),
    ],
)  # fmt: skip
def test_sarif_has_the_structure_of_its_schema(
    runs: tuple[Run, Run], fail_on: set[str] | None, allow: str, level: str, kind: str
) -> None:
    log = json.loads(reports.sarif(settled(runs, fail_on, allow)[0], "1.2.3"))
    fits("log", log)
    assert log["version"] == "2.1.0"
    (only,) = log["runs"]
    fits("run", only)
    fits("tool", only["tool"])
    fits("driver", only["tool"]["driver"])
    rules = only["tool"]["driver"]["rules"]
    for rule in rules:
        fits("rule", rule)
        assert rule["shortDescription"]["text"]
    assert {rule["id"] for rule in rules} == set(compare.EXIT)
    (result,) = only["results"]
    fits("result", result)
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert (result["level"], result["kind"]) == (level, kind)
    assert result["level"] == "none" or result["kind"] == "fail"  # the schema's own rule
    for location in (*result["locations"], *result["relatedLocations"]):
        fits("location", location)
    assert result["message"]["text"].isprintable()


def test_sarif_escapes_an_id_that_is_no_part_of_an_address() -> None:
    a, b = TIE
    odd = replace(b, run_id="a b/../\u202e\ud800<x>")
    log = json.loads(reports.sarif(settled((a, odd))[0], "1"))
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert re.fullmatch(r"provenance:[A-Za-z0-9%._/~-]+", uri)
    assert unquote(uri).startswith("provenance:a b")


# -- JUnit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runs", "tag", "counts"),
    [((run(), run()), "system-out", "0 0"), (TIE, "failure", "1 0"), ((BARE, BARE), "error", "0 1")],
)
def test_junit_counts_what_it_holds(runs: tuple[Run, Run], tag: str, counts: str) -> None:
    root = ET.fromstring(reports.junit(settled(runs)[0]))
    assert root.tag == "testsuites"
    suite = root.find("testsuite")
    assert suite is not None
    assert f"{suite.get('failures')} {suite.get('errors')}" == counts
    assert suite.get("tests") == str(len(suite.findall("testcase"))) == "1"
    case = suite.find("testcase")
    assert case is not None
    assert [item.tag for item in case] == [tag]
    assert case.get("name")
    assert (case[0].get("message") is None) == (tag == "system-out")


def test_junit_tells_the_story_where_it_fails() -> None:
    root = ET.fromstring(reports.junit(settled(TIE)[0]))
    failure = root.find(".//failure")
    assert failure is not None
    assert failure.get("type") == "near_tie"
    assert "Likely cause" in (failure.text or "")


def test_many_runs_are_a_case_for_each_group() -> None:
    answer = many.compare_all([(TIE[0], None), (TIE[1], None), (replace(APART[1], run_id="c"), None)])
    reports.settle(answer)
    root = ET.fromstring(reports.junit(answer))
    assert len(root.findall(".//testcase")) == len(answer["pairs"]) >= 1
    assert "3 runs" in "".join(item.text or "" for item in root.iter("failure"))


def test_text_that_xml_cannot_hold_is_made_visible() -> None:
    a, b = TIE
    hostile = "x\0\x1b[31m\ud800\ufffe\uffff\u202e]]><!--&\x85"
    text = reports.junit(settled((a, replace(b, run_id=hostile)))[0])
    root = ET.fromstring(text)
    case = root.find(".//testcase")
    assert case is not None
    assert "\\x00\\x1b[31m\\ud800\\ufffe\\uffff\\u202e]]><!--&\\x85" in (case.get("name") or "")


def test_a_sequence_is_named_with_its_return() -> None:
    assert story.place({"run": "a", "prompt": 1, "return": 2}) == "a:1.2"
