"""The answer for machines: the exit code, SARIF 2.1.0 and JUnit XML, so that CI can hold outputs still.

A verdict fails unless it is ``same``, or every cause of it that decides was allowed; ``fail_on`` names other verdicts
to fail on. What could not be told is never taken for fine: it keeps its own exit code unless it is named.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from provenance.errors import BadSetting
from provenance.explain import story
from provenance.explain.compare import EXIT, INCONCLUSIVE, SAME, Named

SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
FAILED, UNTOLD = 1, EXIT[INCONCLUSIVE]
RULES = {
    "same": "The outputs are equal",
    "near_tie": "Rounding turned a choice between two tokens that were as good as equal",
    "divergent": "The outputs differ, and not by a near tie",
    "not_comparable": "The inputs or the models differ",
    "inconclusive": "What would decide was not recorded",
}


class Case(NamedTuple):
    """One pair of sequences, as CI counts it."""

    name: str
    a: dict[str, Any]
    b: dict[str, Any]
    verdict: str
    code: int
    allowed: bool
    causes: tuple[str, ...]
    at: int | None
    explained: bool = False  # by what was declared, where it has no causes


def verdicts(given: str) -> frozenset[str]:
    """Read a list of verdicts.

    Raises BadSetting for a name that is none.

    >>> sorted(verdicts("divergent, near_tie"))
    ['divergent', 'near_tie']
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in EXIT:
            raise BadSetting(f"there is no verdict {name!r}; there are {', '.join(EXIT)}.")
    if not names:
        raise BadSetting(f"no verdict is named; there are {', '.join(EXIT)}.")
    return frozenset(names)


def settle(answer: dict[str, Any], fail_on: Collection[str] | None = None, allow: Named = lambda _: False) -> int:
    """Mark in the answer what is allowed, and return the exit code: 0 fine, 1 fails, 3 could not tell."""
    for cause in answer["causes"]:
        cause["allowed"] = allow(cause["field"])
    codes = set()
    for pair in answer["pairs"]:
        told = pair["verdict"] != INCONCLUSIVE  # a cause that may not be the one excuses nothing
        pair["allowed"] = told and bool(pair["deciding"]) and all(map(allow, pair["deciding"]))
        pair["exit"] = _code(pair, fail_on)
        codes.add(pair["exit"])
    return FAILED if FAILED in codes else UNTOLD if UNTOLD in codes else 0


def _code(pair: dict[str, Any], fail_on: Collection[str] | None) -> int:
    if pair["allowed"]:
        return 0
    if fail_on is None:
        return EXIT[pair["verdict"]]
    if pair["verdict"] in fail_on:
        return FAILED
    return UNTOLD if pair["verdict"] == INCONCLUSIVE else 0


def cases(answer: dict[str, Any]) -> list[Case]:
    """Return one case for each pair of an answer that was settled."""
    return [
        Case(
            f"{story.place(pair['a'])} {story.place(pair['b'])}", pair["a"], pair["b"], pair["verdict"], pair["exit"],
            pair["allowed"], tuple(pair["causes"]) if pair["deciding"] else (), pair["first_divergent_token"],
            pair["explained"],
        )
        for pair in answer["pairs"]
    ]  # fmt: skip


def sentence(case: Case) -> str:
    """Say in a line what a case found."""
    where = f"; they part at token {case.at}" if case.at is not None else ""
    causes = f" Likely: {', '.join(case.causes[:4])}." if case.causes else ""
    if case.verdict == SAME:
        causes = ""
    elif case.explained and not case.causes:
        causes = " The declared difference explains it."
    elif not case.causes:
        causes = " No recorded difference explains it."
    return story.visible(f"{RULES[case.verdict]}{where}.{causes}{' Allowed.' if case.allowed else ''}")


def sarif(answer: dict[str, Any], version: str) -> str:
    """Return the answer as a SARIF log, for the views of code scanning."""
    rules = [{"id": name, "shortDescription": {"text": f"{text}."}} for name, text in RULES.items()]
    driver = {"name": "provenance", "version": version, "rules": rules}
    results = [_result(case, list(RULES).index(case.verdict)) for case in cases(answer)]
    help_ = " ".join(story.visible(item) for item in answer["advice"])
    log = {
        "$schema": SARIF, "version": "2.1.0",
        "runs": [{
            "tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results,
            "properties": {"verdict": answer["verdict"], "layer": answer["layer"], "advice": help_},
        }],
    }  # fmt: skip
    return json.dumps(log, indent=2) + "\n"


def _result(case: Case, index: int) -> dict[str, Any]:
    level = "error" if case.code == FAILED else "warning" if case.code == UNTOLD else "none"
    kind = {"error": "fail", "warning": "fail", "none": "pass"}[level]
    if case.code == 0 and case.verdict != SAME:
        level, kind = "note", "fail"  # it differs, and that was accepted
    return {
        "ruleId": case.verdict, "ruleIndex": index, "level": level, "kind": kind,
        "message": {"text": sentence(case)}, "locations": [_location(case.b)], "relatedLocations": [_location(case.a)],
        "partialFingerprints": {"provenance/v1": f"{case.verdict}:{','.join(case.causes[:1])}:{case.b['prompt']}"},
        "properties": {"firstDivergentToken": case.at, "causes": list(case.causes), "allowed": case.allowed},
    }  # fmt: skip


def _location(side: dict[str, Any]) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": "provenance:" + quote(side["run"].encode("utf-8", "backslashreplace"))}
        },
        "logicalLocations": [{"fullyQualifiedName": story.visible(story.place(side)), "kind": "run"}],
    }


class Told(NamedTuple):
    """One test case: its name, the exit code that it asks for, of what kind it is, in a sentence and at length."""

    name: str
    code: int
    kind: str
    message: str
    text: str = ""


def junit(answer: dict[str, Any]) -> str:
    """Return the answer as JUnit XML: a test case for each pair; in error where nothing could be told."""
    return suite("provenance diff", "provenance.diff", told(answer))


def told(answer: dict[str, Any]) -> list[Told]:
    """Return one test case for each pair of an answer that was settled; the pair at its top is told at length."""
    whole = (answer["a"], answer["b"])
    return [
        Told(case.name, case.code, case.verdict, sentence(case), _story(answer) if (case.a, case.b) == whole else "")
        for case in cases(answer)
    ]


def suite(name: str, classname: str, found: Sequence[Told]) -> str:
    """Return test cases as JUnit XML: those that fail, those in error because nothing could be told, and the rest."""
    from xml.etree import ElementTree as ET

    failed, untold = (sum(case.code == code for case in found) for code in (FAILED, UNTOLD))
    counts = {"tests": str(len(found)), "failures": str(failed), "errors": str(untold), "skipped": "0"}
    root = ET.Element("testsuites", counts)
    inner = ET.SubElement(root, "testsuite", {"name": _xml(name), **counts})
    for case in found:
        entry = ET.SubElement(inner, "testcase", {"classname": _xml(classname), "name": _xml(case.name)})
        tag = {FAILED: "failure", UNTOLD: "error"}.get(case.code, "system-out")
        about = {} if tag == "system-out" else {"type": case.kind, "message": _xml(case.message)}
        text = case.text if tag != "system-out" else ""
        ET.SubElement(entry, tag, about).text = text or _xml(case.message)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _story(answer: dict[str, Any]) -> str:
    return "\n".join(_xml(text) for _, text in story.lines(answer))


def _xml(text: str) -> str:
    """Return text that XML can hold; two code points are no characters in it even though nothing else forbids them."""
    return story.visible(text).replace("\ufffe", "\\ufffe").replace("\uffff", "\\uffff")
