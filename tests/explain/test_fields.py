"""Which fields differ: unknown is never equal, missing is never different, one thing is never two."""

from dataclasses import replace

from provenance.explain import fields
from provenance.facts import Field, State
from tests.fakes.runs import run, unknown


def test_differences_and_blind_spots_are_told_apart() -> None:
    a = {"x": Field("x", 1), "y": Field("y", 1), "z": unknown("z"), "only": Field("only", 1)}
    b = {"x": Field("x", 1, source="other"), "y": Field("y", 2), "z": unknown("z")}
    differing, blind = fields.compare(a, b)
    assert [item.name for item in differing] == ["y"]
    assert [(item.name, item.because) for item in blind] == [
        ("only", "not recorded in B"),
        ("z", "not known in both: the driver is not loaded"),
    ]


def test_unset_equals_unset_and_differs_from_a_value() -> None:
    a, b = {"x": Field.unset("x")}, {"x": Field.unset("x")}
    assert fields.compare(a, b) == ([], [])
    differing, _ = fields.compare(a, {"x": Field("x", 1)})
    assert [item.name for item in differing] == ["x"]


def test_withheld_values_equal_nothing() -> None:
    secret = Field("x", None, State.REDACTED, "looks like a credential")
    _, blind = fields.compare({"x": secret}, {"x": Field("x", 1)})
    assert blind[0].because == "withheld in A: looks like a credential"


def test_integers_and_floats_of_one_value_are_one_value() -> None:
    assert fields.compare({"x": Field("x", 1)}, {"x": Field("x", 1.0)}) == ([], [])


def test_a_sequence_brings_its_place_in_the_batch() -> None:
    made = run(inputs=[[1, 2], [3]], outputs=[[5], [6]], fields={"batch.padding_side": "left", "batch.size": 2})
    found = fields.of_sequence(made, made.sequences[1])
    assert found["batch.position"].value == 1
    assert found["batch.padding_tokens"].value == 0
    assert found["batch.padding_side"].state is State.NOT_APPLICABLE


def test_a_sequence_of_a_run_that_drew_brings_its_place_in_the_random_stream() -> None:
    made = run(inputs=[[1, 2], [3]], outputs=[[5], [6]], fields={"rng.batch_shape_at_sampling": 4})
    rows = [replace(made.sequences[n // 2], ret=n % 2) for n in range(4)]
    made = replace(made, sequences=tuple(rows))
    assert [fields.of_sequence(made, row)["rng.row_at_sampling"].value for row in rows] == [0, 1, 2, 3]
    assert "rng.row_at_sampling" not in fields.of_sequence(run(), run().sequences[0])


def test_every_member_of_a_group_is_declared_and_in_one_group() -> None:
    from provenance.catalogue.fields import STRANGER, spec

    names = [name for group in fields.GROUPS for name in group]
    assert len(names) == len(set(names))
    for name in names:
        assert spec(name).group != STRANGER.group, name


def test_a_value_or_its_state_stands_in_the_answer() -> None:
    assert fields.document(Field("x", 3)) == 3
    assert fields.document(unknown("x")) == {"state": "unknown", "reason": "the driver is not loaded"}
    assert fields.document(Field.unset("x")) == {"state": "unset"}


def test_what_is_recorded_only_if_given_is_unset_where_the_other_settings_are_known() -> None:
    name = "generation.stopping_criteria"
    given = Field(name, ["mine.Stop"])
    mode = Field("generation.mode", "greedy_search")
    differing, blind = fields.compare({name: given, mode.name: mode}, {mode.name: mode})
    assert [(item.name, item.a, item.b.state) for item in differing] == [(name, given, State.UNSET)]
    assert blind == []
    unseen = Field.unknown("generation.mode", "the decoding loop was not seen")
    differing, blind = fields.compare({name: given, mode.name: mode}, {mode.name: unseen})
    assert differing == []
    assert name in {item.name for item in blind}


def test_each_row_has_the_tokens_that_its_mask_hides() -> None:
    one = run(outputs=[[5], [6]], inputs=[[1, 2], [3, 4]], fields={"batch.mask_holes": [[[0, 0]], []]})
    own = [fields.of_sequence(one, row)["batch.mask_holes"] for row in one.sequences]
    assert (own[0].value, own[1].state) == ([[0, 0]], State.NOT_APPLICABLE)
    odd = run(fields={"batch.mask_holes": unknown("batch.mask_holes")})
    assert fields.of_sequence(odd, odd.sequences[0])["batch.mask_holes"].state is State.UNKNOWN
    short = run(outputs=[[5], [6]], inputs=[[1, 2], [3, 4]], fields={"batch.mask_holes": [[[0, 0]]]})
    assert fields.of_sequence(short, short.sequences[1])["batch.mask_holes"].state is State.NOT_APPLICABLE


def test_a_keyed_digest_beside_the_content_itself_cannot_be_compared() -> None:
    name = "generation.bad_words_ids"
    sealed, plain = {name: Field(name, "hmac:00")}, {name: Field(name, [[5]])}
    for a, b, side in ((sealed, plain, "A"), (plain, sealed, "B")):
        differing, blind = fields.compare(a, b)
        assert (differing, [item.because for item in blind]) == ([], [f"kept as a keyed digest in {side} alone"])
    assert len(fields.compare(sealed, {name: Field(name, "hmac:01")})[0]) == 1
