"""The nouns: what equals what, which digest depends on what, and that everything written down reads back."""

import random
from typing import Any

import pytest

from provenance import facts
from provenance.facts import Field, Fingerprint, State, WeightEntry, WeightsManifest
from tests.fakes.values import EDGES, nan

A = "generation.temperature"
STATES = {
    "value": Field(A, 1), "unset": Field.unset(A), "not applicable": Field.moot(A, "greedy"),
    "unknown": Field.unknown(A, "not read"), "redacted": Field(A, None, State.REDACTED, "hook"),
}  # fmt: skip
ENTRIES = [
    WeightEntry("tensor", "a.weight", "float32", (2, 3), 24, "11" * 32),
    WeightEntry("tensor", "b.weight", "bfloat16", (), 2, "22" * 32),
    WeightEntry("buffer", "a.scale", "float32", (1,), 4, "33" * 32),
]


# -- fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["value", "unset", "not applicable"])
def test_a_known_field_equals_its_like(state: str) -> None:
    field = STATES[state]
    assert field.known
    assert field == Field(field.name, field.value, field.state)
    assert hash(field) == hash(Field(field.name, field.value, field.state))


@pytest.mark.parametrize("state", ["unknown", "redacted"])
@pytest.mark.parametrize("other", STATES)
def test_unknown_and_redacted_equal_nothing_not_even_themselves(state: str, other: str) -> None:
    assert not STATES[state].known
    assert STATES[state] != STATES[other]
    assert STATES[other] != STATES[state]


def test_states_are_never_equal_to_one_another() -> None:
    fields = list(STATES.values())
    for place, field in enumerate(fields):
        assert all(field != other for other in fields[:place] + fields[place + 1 :])


def test_names_and_values_count_and_sources_and_reasons_do_not() -> None:
    assert Field(A, 1) != Field("generation.top_p", 1)
    assert Field(A, 1) != Field(A, 2)
    assert Field(A, 1, source="call") == Field(A, 1, source="library default")
    assert Field.moot(A, "greedy") == Field.moot(A, "beams")
    assert Field.unset(A, "call") == Field.unset(A)
    assert Field(A, 1) != 1


def test_a_field_without_value_is_not_one_whose_value_is_none() -> None:
    assert Field(A, None) != Field.unset(A)
    assert Field.read(A, Field(A, None).document()) == Field(A, None)


@pytest.mark.parametrize(
    "field",
    [*STATES.values(), Field(A, 0.7, source="call"), Field(A, [1, None, {"b": 2**60}]), Field(A, "\ud800"), Field(A, -0.0),
     Field(A, ""), Field.unknown(A, "a path with \udcff in it"), Field.unknown(A, "")],
    ids=lambda field: ascii(field.show()),
)  # fmt: skip
def test_a_field_reads_back_with_state_reason_and_source(field: Field) -> None:
    back = Field.read(field.name, field.document())
    assert (back.state, back.reason, back.source) == (field.state, field.reason, field.source)
    assert repr(back.value) == repr(field.value)


def test_a_form_without_value_or_state_reads_as_unknown() -> None:
    assert Field.read(A, {}).state is State.UNKNOWN


def test_people_see_the_value_or_why_there_is_none() -> None:
    assert Field(A, 0.5).show() == "0.5"
    assert Field(A, "text").show() == "text"
    assert STATES["unset"].show() == "unset"
    assert STATES["not applicable"].show() == "not applicable: greedy"
    assert STATES["unknown"].show() == "unknown: not read"


# -- fingerprints -------------------------------------------------------------------------------------


def test_the_order_of_fields_does_not_count() -> None:
    fields = [Field(f"flag.{n}", n) for n in range(20)]
    shuffled = random.Random(5).sample(fields, len(fields))
    assert Fingerprint.of("switches", shuffled).digest == Fingerprint.of("switches", fields).digest


@pytest.mark.parametrize(
    "change",
    [Field(A, 0.8), Field(A, "0.7"), Field.unset(A), Field.unknown(A, "why"), Field.moot(A, "greedy"), Field("b", 0.7)],
    ids=lambda field: field.show(),
)
def test_everything_in_a_field_counts(change: Field) -> None:
    one, other = Fingerprint.of("settings", [Field(A, 0.7)]), Fingerprint.of("settings", [change])
    assert one.digest != other.digest
    assert one.value_digest != other.value_digest


def test_the_scope_counts() -> None:
    assert Fingerprint.of("settings", []).digest != Fingerprint.of("switches", []).digest
    assert Fingerprint.of("settings", []).value_digest != Fingerprint.of("switches", []).value_digest


def test_who_set_a_value_counts_for_the_digest_and_not_for_that_of_the_values() -> None:
    one = Fingerprint.of("settings", [Field(A, 0.7, source="call")])
    other = Fingerprint.of("settings", [Field(A, 0.7, source="generation_config")])
    assert one.digest != other.digest
    assert one.value_digest == other.value_digest


def test_the_digests_of_fields_and_of_values_are_never_the_same() -> None:
    print_ = Fingerprint.of("settings", [Field(A, 0.7)])
    assert print_.digest != print_.value_digest


@pytest.mark.parametrize("label", [label for label in EDGES if "depth" not in label])
def test_a_fingerprint_of_any_value_reads_back_to_the_same_bytes(label: str) -> None:
    made = Fingerprint.of("environment", [Field("x", EDGES[label]), Field.unknown("ü", "\udcff")])
    back = Fingerprint.read(made.document)
    assert (back.document, back.digest, back.value_digest, back.scope) == (
        made.document, made.digest, made.value_digest, "environment"
    )  # fmt: skip
    assert back.raw.hex() == made.digest.rpartition(":")[2]


def test_two_keys_that_have_the_same_form_cost_no_bit_of_the_digest() -> None:
    made = Fingerprint.of("model", [Field("x", {b"one": 1, b"two": 2})])
    assert Fingerprint.read(made.document).digest == made.digest


def test_a_nan_has_one_digest_whatever_its_bits() -> None:
    prints = {Fingerprint.of("settings", [Field(A, nan(bits))]).digest for bits in (0x7FF8 << 48, 0xFFF8 << 48 | 5)}
    assert len(prints) == 1


def test_a_name_outside_ascii_is_written_with_escapes() -> None:
    assert set(Fingerprint.read(Fingerprint.of("environment", [Field("env.é", 1)]).document).fields) == {"env.\\xe9"}


# -- weights ------------------------------------------------------------------------------------------


def test_the_root_depends_neither_on_order_nor_on_how_the_tensors_are_spread() -> None:
    shards = [ENTRIES[2:], ENTRIES[:1], ENTRIES[1:2]]
    together = WeightsManifest("tensors", tuple(ENTRIES))
    spread = WeightsManifest("tensors", tuple(entry for shard in shards for entry in shard))
    assert spread.root == together.root
    assert spread.document() == together.document()


@pytest.mark.parametrize(
    "change",
    [{"name": "c.weight"}, {"dtype": "float16"}, {"shape": (3, 2)}, {"sha256": "44" * 32}, {"kind": "buffer"}],
    ids=str,
)
def test_names_types_shapes_and_bytes_count(change: dict[str, Any]) -> None:
    changed = [ENTRIES[0]._replace(**change), *ENTRIES[1:]]
    assert WeightsManifest("tensors", tuple(changed)).root != WeightsManifest("tensors", tuple(ENTRIES)).root


def test_a_missing_or_doubled_tensor_counts() -> None:
    roots = {WeightsManifest("tensors", tuple(e)).root for e in (ENTRIES, ENTRIES[1:], [*ENTRIES, ENTRIES[0]], [])}
    assert len(roots) == 4


def test_tensors_and_files_of_equal_entries_have_roots_of_their_own() -> None:
    assert WeightsManifest("files", tuple(ENTRIES)).root != WeightsManifest("tensors", tuple(ENTRIES)).root


def test_a_manifest_reads_back() -> None:
    odd = WeightEntry("file", "mod\udcffel.bin", "", (), 2**40, "55" * 32)
    manifest = WeightsManifest("files", (odd, *ENTRIES))
    back = WeightsManifest.read(manifest.document())
    assert sorted(back.entries) == sorted(manifest.entries)
    assert back.root == manifest.root


# -- numbers that stand in journals -------------------------------------------------------------------


def test_the_numbers_in_journals_never_change() -> None:
    assert facts.ROLES == {
        1: "prompt.ids", 2: "prompt.text", 3: "prompt.mask", 4: "prompt.embeds", 5: "prompt.media", 6: "prompt.messages",
        7: "arguments", 16: "output.ids", 17: "output.text", 18: "output.value", 19: "output.media",
        32: "evidence.logits", 40: "rng.torch_cpu", 41: "rng.torch_cuda", 42: "rng.torch_mps", 43: "rng.python",
        44: "rng.numpy", 45: "rng.torch_xpu", 48: "error.text", 33: "evidence.logprobs",
    }  # fmt: skip
    assert (facts.TEXT, facts.BUFFER, facts.VALUE, facts.OCTETS, facts.DIGEST, facts.SEALED) == (0, 1, 2, 3, 4, 0x80)
    assert facts.STATUSES == ("running", "ok", "error", "aborted", "abandoned", "partial", "crashed")
    assert facts.FINISHES == ("unknown", "eos", "length", "stop_string", "max_time", "criteria", "returned", "cut")
    assert facts.NOTES == {
        1: "environment", 2: "switches", 3: "model", 4: "settings", 5: "weights", 6: "binding", 7: "gap", 8: "erased",
        9: "clock_step",
    }  # fmt: skip
