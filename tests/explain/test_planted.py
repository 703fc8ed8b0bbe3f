"""The explainer on real divergences: forty plants on real models, each recorded, read back from a store, and explained.

Whether a numeric plant turns a choice depends on the processor, so each is tried on a few prompts; it counts where outputs
part. Plants that part must be named, and what they are must be told: a near tie, or another function.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import provenance
from provenance.explain import compare
from provenance.store import database, queries
from tests.fakes import planted

TRIES = 4
pytestmark = pytest.mark.timeout(900)  # some ninety real calls, on whatever else the machine does


@dataclass
class Parted:
    """A plant whose outputs parted, and the answer to it; and the pairs of it that did not part."""

    plant: planted.Plant
    answer: dict[str, Any] | None
    calm: list[dict[str, Any]]


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Parted]]:
    """Run every plant once, and explain it from the store."""
    db = tmp_path_factory.mktemp("planted") / "p.db"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVENANCE_KEY_FILE", str(db.with_name("key")))
        provenance.init(db=str(db), writer="thread")
        try:
            asked = _ask(planted.Bench())
            assert provenance.flush(120)
        finally:
            torch.set_num_threads(before)
            _close()
    engine = database.reading(f"sqlite:///{db}", db)
    yield [_explained(engine, plant, pairs) for plant, pairs in asked]
    engine.dispose()


def _ask(bench: planted.Bench) -> list[tuple[planted.Plant, list[tuple[str, str]]]]:
    asked = []
    for plant in planted.PLANTS:
        pairs = []
        for prompt in planted.PROMPTS[:TRIES]:
            bench.made.clear()
            pairs.append((plant.a(bench, prompt), plant.b(bench, prompt)))
            if bench.made[0] != bench.made[-1]:
                break
        asked.append((plant, pairs))
    return asked


def _close() -> None:
    recorder = sys.modules["provenance.recorder"]
    with contextlib.suppress(Exception):
        recorder._state["recorder"].close()
    recorder._state.update(recorder=None, settings=None, parent=None, refused="")


def _explained(engine: Any, plant: planted.Plant, pairs: list[tuple[str, str]]) -> Parted:
    calm: list[dict[str, Any]] = []
    for one, other in pairs:
        answer = compare.compare(queries.load(engine, one), queries.load(engine, other), (0, 0), (0, 0))
        if answer["outputs"]["equal"] is False:
            return Parted(plant, answer, calm)
        calm.append(answer)
    return Parted(plant, None, calm)


def _named(item: Parted) -> bool:
    assert item.answer is not None
    first = item.answer["causes"][:1]
    return bool(first) and bool({first[0]["field"], *first[0]["with"]} & set(item.plant.fields))


def test_the_planted_cause_comes_first(parted: list[Parted]) -> None:
    found = [item for item in parted if item.answer is not None]
    assert len(found) >= 30, f"{len(found)} of {len(parted)} plants part on this processor"
    missed = [
        (item.plant.name, [cause["field"] for cause in item.answer["causes"][:3]])  # type: ignore[index]
        for item in found
        if not _named(item)
    ]
    assert len(missed) <= 0.05 * len(found), missed


def test_a_near_tie_is_called_one_and_another_function_is_not(parted: list[Parted]) -> None:
    wrong = []
    for item in parted:
        if item.answer is None:
            continue
        near = item.answer["verdict"] == "near_tie"
        rounding = (item.answer["outputs"]["logit_change"] or {}).get("kind") == "rounding"
        if item.plant.kind == planted.SEMANTIC and near:
            wrong.append((item.plant.name, "called a near tie"))
        if item.plant.kind == planted.MODEL and item.answer["verdict"] != "not_comparable":
            wrong.append((item.plant.name, item.answer["verdict"]))
        if item.plant.kind == planted.NUMERIC and rounding and not near:
            wrong.append((item.plant.name, item.answer["verdict"]))
    assert wrong == []


def test_what_changes_nothing_is_blamed_for_nothing(parted: list[Parted]) -> None:
    """A numeric field may differ and the text not: then there is no cause of a change of text."""
    calm = [answer for item in parted for answer in item.calm]
    assert len(calm) >= 10
    for answer in calm:
        assert answer["causes"] == []
        assert answer["verdict"] == "same"


def test_confidence_is_not_less_than_what_it_should_be(parted: list[Parted]) -> None:
    """Where one thing was changed and named, the answer is sure of it, and never certain."""
    for item in parted:
        if item.answer is not None and _named(item):
            assert 0.5 <= item.answer["causes"][0]["confidence"] < 1.0, item.plant.name
