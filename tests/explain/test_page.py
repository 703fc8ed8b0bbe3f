"""The page: whole, self-contained, well formed, and safe against the text of anybody."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from provenance.explain import compare, many, page, reports
from provenance.facts import Field, Run, Sequence
from tests.explain.test_compare import pair
from tests.fakes.runs import default_steps, run, step, unknown

EMPTY = {"meta", "br", "rect", "line", "polyline", "circle", "link", "img"}
HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x1b[31m\0\ud800&amp;'`${x}"


class Reader(HTMLParser):
    """Checks that tags close in order, and keeps what could act."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def made(a: Run, b: Run, **more: Any) -> str:
    answer = compare.compare(a, b)
    reports.settle(answer)
    text = page.page(answer, a, b, **more)
    safe(text)
    return text


def safe(text: str) -> None:
    reader = Reader(text)
    assert not reader.tags & {"script", "img", "iframe", "object", "link", "base", "form", "a", "audio", "video"}
    assert not any(name.startswith("on") or name in ("src", "href", "srcset", "action") for name in reader.attributes)
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text)
    assert not any(char in text for char in "\u202e\x1b\0\ud800")
    text.encode()


def told(a: Run, b: Run, text_a: str | None, text_b: str | None) -> tuple[Run, Run]:
    return (
        replace(a, sequences=(replace(a.sequences[0], output_text=text_a),)),
        replace(b, sequences=(replace(b.sequences[0], output_text=text_b),)),
    )


def test_it_shows_all_parts_of_the_answer() -> None:
    more = {
        "generation.top_p": 0.9,
        "cpu.capability": unknown("cpu.capability"),
        "batch.size": 8,
        "context.x": 1,
    }
    a, b = told(*pair({"batch.size": 1}, more), "The same. One", "The same. Two")
    text = made(a, b)
    for title in ("Where they part", "The two outputs", "How close each choice was", "Likely cause", "What to do",
                  "Differs and cannot be the cause (", "Could not be compared (", "All fields, by layer"):  # fmt: skip
        assert f"<h2>{title}" in text, title
    assert 'class="badge near_tie"' in text
    assert "The same. <mark>One</mark>" in text
    assert "The same. <mark>Two</mark>" in text
    assert 'aria-label="token 1, where the outputs part"' in text
    assert text.count('class="token parts') == 2
    assert "prefers-color-scheme:dark" in text
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text
    assert "<code>provenance diff" in text


@pytest.mark.parametrize("where", ["id", "text", "field", "name", "reason", "finish", "piece"])
def test_hostile_text_is_seen_and_does_not_act(where: str) -> None:
    a, b = pair({"batch.size": 1}, {"batch.size": 8})
    if where == "id":
        b = replace(b, run_id=HOSTILE)
    if where == "text":
        a, b = told(a, b, "x", HOSTILE)
    if where == "field":
        b = replace(
            b, fields={**b.fields, "generation.repetition_penalty": Field("generation.repetition_penalty", HOSTILE)}
        )
    if where == "name":
        b = replace(b, fields={**b.fields, HOSTILE: Field(HOSTILE, 1)})
        a = replace(a, fields={**a.fields, HOSTILE: Field(HOSTILE, 2)})
    if where == "reason":
        b = replace(b, fields={**b.fields, "weights.loaded_root": unknown("weights.loaded_root", HOSTILE)})
    if where == "finish":
        a, b = run([[5, 6, 7]]), run([[5, 6]])
        b = replace(b, sequences=(replace(b.sequences[0], finish=HOSTILE),))
    pieces = {"text_a": lambda _: HOSTILE} if where == "piece" else {}
    text = made(a, b, **pieces)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert where == "field" or "\\u202e\\x1b[31m\\x00" in text  # a value is cut


def test_equal_tokens_with_another_text_have_no_place_where_they_part() -> None:
    text = made(*told(run(), run(), "x", "y"))
    assert "<svg" in text
    assert "<mark>x</mark>" in text
    assert 'class="cut"' not in text


def test_one_output_that_ends_first_is_shown_as_ended() -> None:
    text = made(run([[5, 6, 7, 8]]), run([[5, 6]]))
    assert "ended: length" in text
    assert text.count("ended:") == 1


def test_a_long_output_shows_the_tokens_around_the_place_only() -> None:
    ids = list(range(100, 700))
    steps = [step(token, 99, 1.0 + token % 7) for token in ids]
    other = [*ids[:500], 7, *ids[501:]]
    a = run([ids], steps=[steps])
    b = run([other], steps=[[replace(step(token, 99, 0.01), token=token) for token in other]])
    text = made(a, b)
    assert "476 equal tokens …" in text
    assert "… 75 more" in text
    points = re.findall(r'polyline class="line a" points="([^"]+)"', text)[0].split()
    assert len(points) <= page.POINTS


def test_equal_outputs_make_a_short_page() -> None:
    text = made(run(), run(fields={"torch.num_threads": 1}))
    assert 'class="badge same"' in text
    assert "Where they part" not in text
    assert "Likely cause" not in text


def test_nothing_is_drawn_of_what_was_not_recorded() -> None:
    a = replace(run(), sequences=(Sequence(0, 0, input_key="k", output_key="x", output_text="a"),))
    b = replace(run(), sequences=(Sequence(0, 0, input_key="k", output_key="y", output_text="b"),))
    text = made(a, b)
    assert "<svg" not in text
    assert "token evidence" in text
    assert "No recorded difference explains it." in text


@pytest.mark.parametrize("margin", [0.0, 5e-324, 1e308, float("inf"), float("nan"), -1.0, None])
def test_any_margin_can_be_drawn(margin: float | None) -> None:
    steps = [replace(step(5, 99, 3.0), margin=margin), replace(step(6, 7, 0.5), margin=margin)]
    text = made(
        run([[5, 6]], steps=[steps]), run([[5, 7]], steps=[[step(5, 99, 1e-3), replace(step(6, 7, 0.2), token=7)]])
    )
    assert "<svg" in text
    assert not re.search(r'(?:points|x|y|x1|y1|cx|cy|height)="[^"]*(?:nan|inf)', text)


def test_margins_without_movement_of_logits_have_no_band() -> None:
    bare = [replace(item, top_ids=(), top_logits=()) for item in default_steps([5, 6])]
    text = made(run([[5, 6]], steps=[bare]), run([[5, 7]], steps=[[bare[0], replace(bare[1], token=7)]]))
    assert "<svg" in text
    assert 'class="band"' not in text


def test_an_unlimited_allowance_of_rounding_is_drawn_to_the_top() -> None:
    answer = compare.compare(*pair())
    answer["outputs"]["logit_change"]["rounding_allows"] = float("inf")
    assert 'class="band"' in page.page(answer, *pair())


def test_a_text_that_is_the_beginning_of_the_other_ends_in_a_mark() -> None:
    text = made(*told(*pair(), "The same", "The same" + "\nand more" * 2000))
    assert "The same<mark>∎</mark>" in text
    assert " …</pre>" in text
    cut = made(*told(*pair(), "x" * 9000 + "a", "x" * 9000 + "b"))
    assert "<pre>… x" in cut


def test_many_fields_are_cut_and_counted() -> None:
    more = {f"my.f{n}": n for n in range(page.ROWS + 5)}
    a, b = pair(more, {name: value + 1 for name, value in more.items()}, moved=0.5)
    assert "and 5 more" in made(a, b)


def test_what_is_allowed_and_what_is_declared_is_said() -> None:
    a, b = pair({"batch.size": 1, "cpu.capability": "AVX2"}, {"batch.size": 8, "cpu.capability": "DEFAULT"})
    answer = compare.compare(a, b, declared=lambda name: name == "batch.size")
    reports.settle(answer, None, lambda name: name == "cpu.capability")
    text = page.page(answer, a, b)
    safe(text)
    assert "Declared to differ (1)" in text
    assert "This difference was allowed." in text


def test_of_many_runs_it_shows_the_table() -> None:
    a, b = pair({"batch.size": 1}, {"batch.size": 8})
    third = replace(b, run_id="c", name=HOSTILE)
    answer = many.compare_all([(a, None), (b, None), (third, None)])
    reports.settle(answer)
    text = page.page(answer, a, b)
    safe(text)
    assert "3 runs, 2 outputs" in text
    assert "batch.size separates the 2 groups exactly." in text
    same = many.compare_all([(a, None), (a, None), (a, None)])
    reports.settle(same)
    assert "3 runs, 1 output<" in page.page(same, a, a)


def test_two_causes_name_each_other() -> None:
    a, b = pair({"batch.size": 1, "torch.num_threads": 1}, {"batch.size": 8, "torch.num_threads": 2})
    assert "As good an explanation: batch.size." in made(a, b)


def test_a_return_is_part_of_the_place() -> None:
    a, b = pair()
    a = replace(a, sequences=(replace(a.sequences[0], ret=2),))
    assert f"{a.run_id}:0.2" in made(a, b)
