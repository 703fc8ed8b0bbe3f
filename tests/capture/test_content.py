"""Under `capture=digest` no word of the user's stands in a setting, and equal settings are still seen as equal."""

from pathlib import Path
from typing import Any

import pytest

import provenance
from provenance import privacy
from provenance.explain.fields import compare
from provenance.facts import Field, Run, State
from tests.fakes import engines as fakes
from tests.fakes import models

KEY, OTHER = bytes(range(32)), bytes(32)
WORD = "Zq7unheard-of"
IDS = [[40123, 40124], [40125]]


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


def _settings(value: Any = WORD) -> list[Field]:
    return [
        Field("generation.stop_strings", [value]),
        Field("generation.bad_words_ids", IDS),
        Field("generation.sequence_bias", {"(40123, 40124)": -9.0}),
        Field("generation.suppress_tokens", [40123]),
        Field("generation.forced_decoder_ids", [[1, 40123]]),
        Field("generation.prompt_of_mine", value),
        Field("generation.tables_of_mine", {"a": [value, 40123]}),
        Field("vllm.sampling.stop", value),
        Field("vllm.sampling.logit_bias", {"40123": 1.0}),
        Field("sglang.sampling.regex", value),
        Field("service.request.stop", [value]),
    ]


PLAIN = [
    Field("generation.eos_token_id", [2, 3]), Field("generation.forced_bos_token_id", 7), Field("generation.top_k", 50),
    Field("generation.number_of_mine", 40), Field("generation.stop_strings", []), Field("generation.bad_words_ids", None, State.UNSET),
    Field("generation.mode", "sample"), Field("generation.cache_config", {"backend": "quanto"}), Field("vllm.sampling.stop_token_ids", [2]),
    Field("generation.logits_processor", ["mine.Shift"]), Field("generation.user_set_fields", ["top_k"]),
]  # fmt: skip


@pytest.mark.parametrize("item", _settings(), ids=lambda item: item.name)
def test_a_setting_with_words_in_it_is_a_keyed_digest(item: Field) -> None:
    (found,) = privacy.guarded([item], "digest", KEY)
    assert (found.name, found.state, found.source) == (item.name, State.VALUE, item.source)
    assert isinstance(found.value, str)
    assert found.value.startswith("hmac:")
    assert privacy.guarded([item], "digest", KEY) == [found]
    assert privacy.guarded([item], "digest", OTHER)[0].value != found.value
    assert privacy.guarded([item], "full", KEY) == [item]
    (off,) = privacy.guarded([item], "off", KEY)
    assert (off.value, off.state, off.reason) == (None, State.REDACTED, privacy.NOT_KEPT)


def test_another_word_has_another_digest() -> None:
    one, other = (privacy.guarded(_settings(word), "digest", KEY) for word in ("one", "other"))
    names = [a.name for a, b in zip(one, other, strict=True) if a.value == b.value]
    assert names == [item.name for item in _settings() if WORD not in repr(item.value)]


@pytest.mark.parametrize("item", PLAIN, ids=lambda item: item.name)
def test_a_setting_without_words_stays(item: Field) -> None:
    for mode in ("full", "digest", "off"):
        assert privacy.guarded([item], mode, KEY) == [item]


def test_a_digest_is_not_held_against_the_value_itself() -> None:
    (clear,) = _settings()[:1]
    (sealed,) = privacy.guarded([clear], "digest", KEY)
    differing, blind = compare({"x": sealed}, {"x": clear})
    assert (differing, [item.because for item in blind]) == ([], ["kept as a keyed digest in A alone"])
    (other,) = privacy.guarded(_settings("another")[:1], "digest", KEY)
    assert len(compare({"x": sealed}, {"x": other})[0]) == 1
    assert len(compare({"x": sealed}, {"x": Field.unset("x")})[0]) == 1


def _written(db: Path) -> bytes:
    return b"".join(path.read_bytes() for path in db.parent.rglob("*") if path.is_file())


def test_no_byte_of_a_word_is_written_by_a_model(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_CAPTURE", "digest")
    model, letters = provenance.wrap(models.llama(), tokenizer=models.letters()), models.letters()
    for word in (WORD, WORD, "another"):
        model.generate(
            models.tensor(), max_new_tokens=2, stop_strings=[word], tokenizer=letters, bad_words_ids=[[36, 22], [8]]
        )
    provenance.flush()
    stops = [run.fields["generation.stop_strings"].value for run in models.runs(db)]
    assert stops[0] == stops[1] != stops[2]
    assert {str(run.fields["generation.bad_words_ids"].value)[:5] for run in models.runs(db)} == {"hmac:"}
    assert WORD.encode() not in _written(db)
    assert b"[[36,22],[8]]" not in _written(db)


def _engine(db: Path) -> Run:
    params = fakes.SamplingParams(temperature=0.0, max_tokens=2, stop=[WORD], logit_bias={5: 1.0})
    provenance.wrap(fakes.LLM()).generate("ab", params)
    provenance.wrap(fakes.Engine()).generate(
        "ab", {"stop": [WORD], "regex": WORD, "api_key": "plain-7-text", "custom": {"a": WORD}}
    )
    provenance.flush()
    return models.runs(db)[-1]


def test_no_byte_of_a_word_is_written_by_an_engine(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_CAPTURE", "digest")
    fakes.load(monkeypatch, "vllm", "sglang")
    run = _engine(db)
    assert run.fields["sglang.sampling.api_key"].state is State.REDACTED
    assert str(run.fields["sglang.sampling.custom"].value).startswith("hmac:")
    assert WORD.encode() not in _written(db)
    assert b"plain-7-text" not in _written(db)
