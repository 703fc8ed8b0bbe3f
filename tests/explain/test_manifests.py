"""Two manifests side by side."""

from provenance.explain import manifests
from provenance.facts import WeightEntry, WeightsManifest


def _tensor(
    name: str, sha: str = "a", dtype: str = "float32", shape: tuple[int, ...] = (2,), kind: str = "tensor"
) -> WeightEntry:
    return WeightEntry(kind, name, dtype, shape, 8, sha * 64)


def _manifest(*entries: WeightEntry, kind: str = "tensors") -> WeightsManifest:
    return WeightsManifest(kind, entries)


def test_every_way_to_differ_is_told_apart() -> None:
    a = _manifest(_tensor("same"), _tensor("bytes"), _tensor("type"), _tensor("shape"), _tensor("gone"))
    b = _manifest(
        _tensor("new"), _tensor("shape", shape=(1, 2)), _tensor("type", dtype="bfloat16"), _tensor("bytes", "b"),
        _tensor("same"),
    )  # fmt: skip
    found = manifests.compare(a, b)
    assert found.shared == 4
    assert [one.name for one, _ in found.differing] == ["bytes", "shape", "type"]
    assert [one.name for one, _ in found.dtypes] == ["type"]
    assert [one.name for one, _ in found.shapes] == ["shape"]
    assert (found.only_a, found.only_b, found.equal) == (("gone",), ("new",), False)
    assert manifests.sentence(found) == (
        "3 of 4 tensors differ: bytes, shape, type; 1 changed dtype; 1 changed shape; "
        "1 only in A: gone; 1 only in B: new"
    )  # fmt: skip


def test_the_same_is_the_same_in_any_order() -> None:
    a, b = _manifest(_tensor("x"), _tensor("y", "b")), _manifest(_tensor("y", "b"), _tensor("x"))
    found = manifests.compare(a, b)
    assert found.equal
    assert manifests.sentence(found) == "2 tensors are the same"


def test_what_files_cannot_hold_is_no_difference_from_them_and_one_between_two_memories() -> None:
    memory = _manifest(_tensor("embed"), _tensor("head"), _tensor("inv_freq", "c", kind="buffer"))
    saved = _manifest(_tensor("embed"), kind="checkpoint")
    found = manifests.compare(memory, saved)
    assert found.equal
    assert found.spared == ("head", "inv_freq")
    assert manifests.compare(saved, memory).spared == ("head", "inv_freq")
    untied = _manifest(_tensor("embed"), _tensor("head", "d"), kind="tensors")
    assert manifests.compare(untied, saved).only_a == ("head",)
    assert manifests.compare(memory, _manifest(_tensor("embed"))).only_a == ("head", "inv_freq")


def test_long_lists_are_cut() -> None:
    a = _manifest(*(_tensor(f"t{n:02}") for n in range(20)))
    b = _manifest(*(_tensor(f"t{n:02}", "b") for n in range(20)))
    said = manifests.sentence(manifests.compare(a, b))
    assert said == "20 of 20 tensors differ: t00, t01, t02, t03, t04, t05 and 14 more"


def test_whole_files_and_tensors_cannot_be_compared() -> None:
    whole = _manifest(WeightEntry("file", "x.gguf", "", (), 8, "a" * 64), kind="files")
    assert manifests.incomparable(whole, whole) == ""
    assert manifests.incomparable(_manifest(_tensor("x")), whole) == "B is known by whole files alone and A by tensors"
    assert manifests.incomparable(whole, _manifest(_tensor("x"))) == "A is known by whole files alone and B by tensors"
