"""Two real incidents at temperature 0, recorded with llama.cpp: from the exported runs of both sides, the cause comes first."""

from pathlib import Path

import pytest

from provenance.explain import compare
from provenance.store import export
from tests.conftest import Command

HERE = Path(__file__).parent / "llama"
CASES = [
    ("penalty-library", "penalty-server", "llama_cpp.sampling.repeat_penalty", (1.0, 1.1)),
    ("cache-f16", "cache-q8_0", "llama_cpp.type_k", (1, 8)),
]


@pytest.mark.parametrize(("one", "other", "field", "values"), CASES, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_true_cause_comes_first(
    one: str, other: str, field: str, values: tuple[float, float], swapped: bool
) -> None:
    sides = [export.read_file(HERE / f"{name}.json") for name in (one, other)]
    if swapped:
        sides, values = sides[::-1], values[::-1]
    answer = compare.compare(sides[0], sides[1])
    first = answer["causes"][0]
    assert (answer["inputs"]["equal"], answer["outputs"]["equal"]) == (True, False)
    assert (first["field"], first["a"], first["b"]) == (field, *values)
    assert first["confidence"] >= 0.8
    assert answer["verdict"] == "divergent"


def test_two_machines_can_compare_them_without_a_database(command: Command) -> None:
    said = command("diff", str(HERE / "penalty-library.json"), str(HERE / "penalty-server.json"))
    assert said.returncode == 1, said.stderr
    assert "1. llama_cpp.sampling.repeat_penalty: 1.0 in A, 1.1 in B" in said.stdout


def test_without_the_field_on_one_side_it_is_named_as_what_would_decide() -> None:
    a, b = (export.read_file(HERE / f"{name}.json") for name in ("penalty-library", "penalty-server"))
    from tests.incidents.pairs import without

    answer = compare.compare(a, without(b, ["llama_cpp.sampling.repeat_penalty"]))
    assert answer["verdict"] == "inconclusive"
    assert "llama_cpp.sampling.repeat_penalty" in [item["field"] for item in answer["unknown"] if item["would_decide"]]
