"""The bytes that are hashed: one form, refusals that name the place, and nothing lost on the way in and out."""

from typing import Any

import pytest

from provenance.errors import NotCanonical
from provenance.integrity.canonical import PREFIX, canonical, digest, named, plain, raw, restore
from tests.fakes.values import INF, Loud


class Text(str):
    """A text of a type of its own."""

    __slots__ = ()


def test_order_of_keys_and_white_space_do_not_count() -> None:
    assert canonical({"b": 1, "a": {"d": [], "c": "x"}}) == b'{"a":{"c":"x","d":[]},"b":1}'
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})


def test_order_of_a_list_counts() -> None:
    assert canonical([1, 2]) != canonical([2, 1])


def test_text_is_utf8_and_escaped_no_more_than_it_must_be() -> None:
    assert canonical('é𝄞/"\\\n\x7f\x01') == '"é𝄞/\\"\\\\\\n\x7f\\u0001"'.encode()


def test_true_and_one_are_not_the_same_bytes() -> None:
    assert len({canonical(value) for value in ([True], [1], ["1"], ["true"])}) == 4


@pytest.mark.parametrize("number", [2**53, -(2**53), 0])
def test_integers_up_to_2_to_the_53_have_bytes(number: int) -> None:
    assert canonical(number) == str(number).encode()


@pytest.mark.parametrize(
    "value",
    [0.5, 1.0, float("nan"), 2**53 + 1, -(2**53) - 1, 2**70, "a\ud800", b"x", (1,), {1}, {1: 2}, {"é": 1},
     {"\ud800": 1}, {None: 1}, Text("x"), {Text("x"): 1}, object(), Loud()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_has_no_canonical_bytes_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(NotCanonical, match=r"\$\.a\[1\]"):
        canonical({"a": [0, value]})


def test_a_refusal_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match=r"0\.5 at"):
        canonical(0.5)


def test_a_digest_says_its_version_and_algorithm_and_comes_back_from_32_bytes() -> None:
    text = digest(b"abc")
    assert text == PREFIX + "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert len(raw(text)) == 32
    assert named(raw(text)) == text


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (None, None), (True, True), (7, 7), (2**53, 2**53), (2**53 + 1, {"integer": "9007199254740993"}),
        (-(2**60), {"integer": "-1152921504606846976"}), (0.7, {"float": "0.7"}), (1.0, {"float": "1.0"}),
        (-0.0, {"float": "-0.0"}), (INF, {"float": "inf"}), (float("nan"), {"float": "nan"}), ("é", "é"),
        ("a\ud800", {"text": "61eda080"}), ((1, [2]), [1, [2]]), ({2, 1}, [1, 2]),
        ({"a": 0.5}, {"a": {"float": "0.5"}}), ({1: 2}, {"pairs": [[1, 2]]}),
        ({"float": "x"}, {"pairs": [["float", "x"]]}), ({"é": 1}, {"pairs": [["é", 1]]}),
        (object(), {"type": "builtins.object"}), (Text("x"), "x"),
    ],
)  # fmt: skip
def test_a_fields_value_has_one_form_in_the_subset(value: object, form: object) -> None:
    assert plain(value) == form
    assert type(plain(value)) is type(form)
    canonical(plain(value))


@pytest.mark.parametrize(
    "value",
    [
        {"a": [0.1, -0.0, 2**60, None, True, "x", INF, -INF]}, "\udfff", {"1": "text", 1: "int"},
        {(1, 2): {"text": "61"}}, {"float": "0.5"},
        {"integer": "12"}, {"text": "61"}, {"pairs": []}, {"float": 1, "more": 2}, [], {}, [[[]]],
        {"é": {"ü": 1}}, {"": ""}, 1e-320, -(2**53) - 1,
    ],
)  # fmt: skip
def test_a_fields_value_comes_back(value: object) -> None:
    back = restore(plain(value))
    assert back == value
    assert repr(back) == repr(value)  # so 1 is not True, and -0.0 not 0.0


def test_nan_comes_back_as_nan() -> None:
    back = restore(plain(float("nan")))
    assert isinstance(back, float)
    assert back != back


def test_a_form_depends_on_no_order_that_python_chooses() -> None:
    assert list({0, 8}) != list({8, 0})  # equal, and yet walked in another order
    assert canonical(plain({0, 8})) == canonical(plain({8, 0}))
    assert canonical(plain({"é": 1, 2: 2})) == canonical(plain({2: 2, "é": 1}))


def test_no_strangers_code_is_run() -> None:
    assert plain([Loud()]) == [{"type": "tests.fakes.values.Loud"}]
