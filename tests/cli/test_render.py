"""Printing: boxes for people, columns for pipes, and nothing of others acts."""

import pytest

from provenance.cli import render


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    render.table(("a", "long head"), [(1, None), (b"\x01\x02", 0.25)])
    assert capsys.readouterr().out == "a     long head\n1\n0102  0.25\n"


def test_an_empty_table_has_its_heads(capsys: pytest.CaptureFixture[str]) -> None:
    render.table(("a", "b"), [])
    assert capsys.readouterr().out == "a  b\n"


def test_on_a_terminal_it_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(render, "terminal", lambda: True)
    render.table(("run",), [("x" * 10,)])
    render.lines([("head", "Same"), ("cause", "1. \x1b[31mx")])
    said = capsys.readouterr().out
    assert "x" * 10 in said
    assert "\x1b[31m" not in said


def test_controls_marks_and_surrogates_are_seen() -> None:
    assert render.visible("plain") == "plain"
    assert render.visible("é 中 🙂") == "é 中 🙂"
    assert render.visible("a\x9bb\u2066c\ud800") == "a\\x9bb\\u2066c\\ud800"


def test_ids_are_as_short_as_they_can_be() -> None:
    assert render.short_ids(["01a22fdc-8372-7201-8010-aaaa"]) == ["01a22fdc-8372"]
    assert render.short_ids([]) == []


def test_durations_and_texts_are_short() -> None:
    assert render.milliseconds(None) == ""
    assert render.milliseconds(1_500_000) == "2 ms"
    assert render.milliseconds(12_000_000_000) == "12.0 s"
    assert render.clip("a\n b   c", 10) == "a b c"
