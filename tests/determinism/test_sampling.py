"""Clean settings: with them a checkpoint and the library add nothing, and what was changed is told with who had set it."""

import logging
import math
from typing import Any

import pytest

import provenance
from provenance.determinism import sampling
from provenance.errors import BadSetting
from tests.fakes import models

LOUD = {
    "do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9, "top_h": 0.4,
    "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "repetition_penalty": 1.7, "no_repeat_ngram_size": 1, "min_new_tokens": 4,
    "suppress_tokens": [22, 36], "begin_suppress_tokens": [27], "max_time": 100.0, "guidance_scale": 1.5,
    "renormalize_logits": True,
}  # fmt: skip


def loud() -> Any:
    """A model whose checkpoint has an opinion on everything."""
    model = models.llama()
    for name, value in LOUD.items():
        setattr(model.generation_config, name, value)
    return model


def ask(model: Any, config: Any, **more: Any) -> list[int]:
    with provenance.seeded(5):
        out: list[int] = model.generate(models.tensor(), generation_config=config, **more)[0].tolist()
        return out


def plain(**settings: Any) -> list[int]:
    with provenance.seeded(5):
        out: list[int] = models.llama().generate(models.tensor(), max_new_tokens=12, **settings)[0].tolist()
        return out


def test_greedy_is_what_a_model_without_opinions_does() -> None:
    model = loud()
    before = dict(vars(model.generation_config))
    config, changes = provenance.greedy(model, max_new_tokens=12)
    assert ask(model, config) == plain(do_sample=False)
    assert vars(model.generation_config) == before
    assert {item.name for item in changes.acting} >= set(LOUD) - {"min_p"}  # which greedy decoding reads nowhere
    assert {item.by for item in changes.acting} == {sampling.MODEL}
    told = str(changes)
    assert "repetition_penalty = 1.0, was 1.7 by the model's generation config" in told


def test_every_setting_of_the_resolved_configuration_is_the_one_that_stands_there() -> None:
    model = loud()
    config, changes = provenance.greedy(model, max_new_tokens=12)
    resolved, _ = model._prepare_generation_config(config)
    for item in changes:
        if item.name in sampling.ONLY_DRAWN:  # nothing reads them when nothing is drawn
            continue
        assert getattr(resolved, item.name) == item.now, item.name


def test_each_neutral_value_does_nothing() -> None:
    alone = plain(do_sample=False)
    drawn = plain(do_sample=True, top_k=0)
    for name, value in sampling.NEUTRAL.items():
        assert plain(do_sample=False, **{name: value}) == alone, name
        assert plain(do_sample=True, top_k=0, **{name: value}) == drawn, name
    for name, value in sampling.DRAWING.items():
        assert plain(**{"do_sample": True, "top_k": 0, name: value}) == drawn, name


def test_greedy_makes_no_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = models.llama()
    config, _ = provenance.greedy(model, max_new_tokens=3)
    with caplog.at_level(logging.WARNING):
        ask(model, config)
    assert caplog.records == []


def test_what_is_to_be_kept_stays_and_own_settings_win() -> None:
    model = loud()
    config, changes = provenance.greedy(model, keep=["repetition_penalty"], max_new_tokens=12, no_repeat_ngram_size=2)
    assert ask(model, config) == plain(do_sample=False, repetition_penalty=1.7, no_repeat_ngram_size=2)
    assert "repetition_penalty" not in {item.name for item in changes.acting}


def test_a_field_without_a_neutral_value_is_named_and_cleared_on_request() -> None:
    model = models.llama()
    first = plain(do_sample=False)[5]
    model.generation_config.bad_words_ids = [[first]]
    config, changes = provenance.greedy(model, max_new_tokens=12)
    assert ask(model, config) != plain(do_sample=False)  # it acts still, as the change says
    assert [item.note for item in changes.left] == [
        "acts still: `model.generation_config.bad_words_ids = None`, or clear=True"
    ]
    config, changes = provenance.greedy(model, max_new_tokens=12, clear=True)
    assert ask(model, config) == plain(do_sample=False)
    assert model.generation_config.bad_words_ids is None
    assert changes.left == []


def test_sampling_keeps_what_is_set_and_lets_the_library_add_nothing() -> None:
    from transformers import GenerationConfig

    config, changes = provenance.clean_sampling(GenerationConfig(temperature=0.6, min_length=7), max_new_tokens=12)
    assert (config.temperature, config.top_k, config.top_p, config.do_sample) == (0.6, 0, 1.0, True)
    assert config.min_length == 7
    assert config.min_new_tokens is None
    assert next(item for item in changes if item.name == "top_k").before == 50
    assert next(item for item in changes if item.name == "top_k").by == sampling.LIBRARY
    model = loud()
    model.generation_config.guidance_scale = model.generation_config.min_new_tokens = None
    model.generation_config.top_h = None
    config, changes = provenance.clean_sampling(GenerationConfig(temperature=0.6), model=model, max_new_tokens=12)
    assert ask(model, config) == plain(do_sample=True, temperature=0.6, top_k=0)
    hot, _ = provenance.clean_sampling(GenerationConfig(temperature=6.0), max_new_tokens=12)
    assert ask(models.llama(), hot) != plain(do_sample=True, temperature=6.0)  # where the library cuts to 50


def test_a_models_own_sampling_settings_become_explicit() -> None:
    model = models.llama()
    model.generation_config.top_p = 0.5
    config, changes = provenance.clean_sampling(model, max_new_tokens=12)
    assert (config.top_p, config.top_k) == (0.5, 0)
    assert "top_p" not in {item.name for item in changes.acting}


def test_a_length_that_nobody_set_is_named() -> None:
    _, changes = provenance.greedy(models.llama())
    assert [item.name for item in changes.left] == ["max_new_tokens"]
    assert "after 20 new tokens" in changes.left[0].note


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: provenance.greedy(object()), "has no generation config"),
        (lambda: provenance.greedy(models.llama(), temprature=1), "no generation setting 'temprature'"),
        (lambda: provenance.greedy(models.llama(), keep=["x"]), "no generation setting 'x'"),
        (lambda: provenance.clean_sampling(models.llama(), temperature=0), "use provenance.greedy"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(act: Any, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        act()


def test_the_time_limit_is_no_limit() -> None:
    config, _ = provenance.greedy(loud(), max_new_tokens=2)
    assert config.max_time == math.inf
    assert isinstance(config.to_json_string(), str)
