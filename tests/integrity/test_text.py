"""Texts evened out: each step by name, once is enough, and a difference is of the surface or it is not."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

import provenance
from provenance.errors import BadSetting
from provenance.integrity import text as texts

TRICKY = st.text(
    st.one_of(st.characters(), st.sampled_from(" \n\r\t\u200b\u3000“’－。ﬁ①ßaA\u0308\u0301\u0345\ufeff＝\u0338"))
)
PROFILE = st.one_of(st.sampled_from(sorted(texts.PROFILES)), st.lists(st.sampled_from(sorted(texts.STEPS))))


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [
        ("unicode", "e\u0301", "é"),
        ("compatibility", "ﬁ ①", "fi 1"),
        ("invisible", "a\u200bb\ufeff\u00ad", "ab"),
        ("lines", "a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("width", "Ａ１！\u3000「x」。", 'A1! "x".'),
        ("quotes", "“a” ‘b’ «c»", '"a" \'b\' "c"'),
        ("dashes", "a–b—c−d", "a-b-c-d"),
        ("trailing", "a  \n b\t\n\n", "a\n b"),
        ("blanks", "a \t b\n  c", "a b\nc"),
        ("whitespace", " a\n\n b ", "a b"),
        ("nospace", "a b\nc", "abc"),
        ("case", "STRASSE ß", "strasse ss"),
    ],
)
def test_each_step_does_what_its_name_says(step: str, before: str, after: str) -> None:
    assert provenance.normalize(before, [step]) == after
    assert texts.changed_by(before, [step]) == (step,)
    assert texts.changed_by(after, [step]) == ()


def test_all_steps_are_tested_above() -> None:
    assert len(texts.STEPS) == 12


@given(TRICKY, PROFILE)
def test_once_is_enough(text: str, profile: str | list[str]) -> None:
    once = provenance.normalize(text, profile)
    assert provenance.normalize(once, profile) == once


@given(TRICKY, TRICKY, PROFILE)
def test_two_texts_differ_by_named_steps_or_not_at_all(one: str, other: str, profile: str | list[str]) -> None:
    steps = texts.differs_by(one, other, profile)
    equal = provenance.normalize(one, profile) == provenance.normalize(other, profile)
    assert (steps is not None) == equal
    if steps is not None:
        assert provenance.normalize(one, steps) == provenance.normalize(other, steps)
        assert (steps == ()) == (one == other)


@given(TRICKY)
def test_a_text_and_its_forms_are_one_on_the_surface(text: str) -> None:
    assert texts.differs_by(text, unicodedata.normalize("NFD", text)) is not None
    assert texts.differs_by(text, text.replace("\n", "\r\n") + "  ") is not None


def test_words_are_never_of_the_surface() -> None:
    for one, other in (("yes", "no"), ("1.0", "10"), ("a b", "ab"), ("Yes", "yes"), ("x²", "x2")):
        assert texts.differs_by(one, other) is None
    assert texts.differs_by("Yes ", "yes", "loose") is not None


@pytest.mark.parametrize("profile", ["suface", ["quote"]])
def test_what_is_no_profile_is_said_with_what_is(profile: str | list[str]) -> None:
    with pytest.raises(BadSetting, match=r"there is no (profile|step) '.+'; there are"):
        provenance.normalize("a", profile)
