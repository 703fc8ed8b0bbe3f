"""A recorded `generate` gives what an unrecorded one gives, bit for bit: ids, scores, logits, stream, random state.

One table of ways to call `generate`; each is run bare, on a wrapped model and in an instrumented process. That the
call was really recorded is asserted beside it, or equality would prove nothing.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria

import provenance
from provenance import recorder as recorders
from provenance.capture import observe
from tests.fakes import models

LEFT = ([0, 0, 5, 6, 7], [8, 9, 10, 11, 12], [0, 13, 14, 15, 16])
RIGHT = ([5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [13, 14, 15, 16, 0])
SEEDED = {"do_sample": True}
DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
Case = Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]


class Gatherer:
    """A streamer that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: Any) -> None:
        self.seen.append(value.clone())

    def end(self) -> None:
        self.seen.append("end")


class Shift(LogitsProcessor):  # type: ignore[misc]
    """A processor that makes new scores."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores.roll(1, dims=-1)


class Spoil(LogitsProcessor):  # type: ignore[misc]
    """A processor that writes into the scores it was handed."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, ::3] -= 2.5
        return scores


class OwnList(LogitsProcessorList):  # type: ignore[misc]
    """A list of processors that calls them its own way."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return super().__call__(input_ids, scores, **kwargs) * 0.5


class Enough(StoppingCriteria):  # type: ignore[misc]
    """Stops each row as soon as it holds a token above 40."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return (input_ids[:, -2:] > 40).any(dim=1)


def _mask(rows: tuple[list[int], ...]) -> Any:
    return (torch.tensor(rows) != 0).long()


def _call(**kwargs: Any) -> Case:
    return lambda model: ((models.tensor(),), {"max_new_tokens": 8, **kwargs})


def _batch(rows: tuple[list[int], ...], **kwargs: Any) -> Case:
    return lambda model: (
        (models.tensor(*rows),), {"attention_mask": _mask(rows), "max_new_tokens": 8, **kwargs}
    )  # fmt: skip


def _own_loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    for _ in range(4):
        input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], dim=-1)
    return input_ids


def _embeds(model: Any) -> Any:
    return model.get_input_embeddings()(models.tensor()).detach()


def _config(model: Any, **changes: Any) -> Any:
    return GenerationConfig(**{**models.SPECIAL, "max_new_tokens": 7, **changes})


def _cache(model: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    with torch.no_grad():
        past = model(models.tensor(models.PROMPT[0][:3])).cache
    return (models.tensor(),), {"cache": past, "max_new_tokens": 6}


# Ways to call that every decoder knows.
DECODER: dict[str, Case] = {
    "greedy": _call(),
    "greedy of one token": _call(max_new_tokens=1),
    "sampling": _call(**SEEDED),
    "sampling with temperature, top_k and top_p": _call(temperature=1.7, top_k=20, top_p=0.9, **SEEDED),
    "sampling with min_p and typical_p": _call(min_p=0.01, typical_p=0.95, **SEEDED),
    "sampling several sequences": _call(num_return_sequences=3, **SEEDED),
    "sampling a padded batch": _batch(LEFT, num_return_sequences=2, **SEEDED),
    "beams": _call(num_beams=3),
    "beams, several sequences": _call(num_beams=4, num_return_sequences=3, **DICT),
    "beams of a padded batch": _batch(LEFT, num_beams=2, early_stopping=True, length_penalty=0.5),
    "beam sampling": _call(num_beams=3, top_k=10, **SEEDED),
    "left padding": _batch(LEFT),
    "right padding": _batch(RIGHT),
    "padding without a mask": lambda model: ((models.tensor(*LEFT),), {"max_new_tokens": 8}),
    "a mask with holes": lambda model: (
        (models.tensor(),), {"attention_mask": torch.tensor([[1, 0, 1, 1, 1]]), "max_new_tokens": 8}
    ),
    "many rows": lambda model: ((torch.arange(4, 36).reshape(8, 4),), {"max_new_tokens": 8}),
    "no padding token": _batch(([5, 6], [7, 8]), pad_token_id=None),
    "several ends": _call(eos_token_id=[2, 11, 30, 41, 52], max_new_tokens=30),
    "no end": _call(eos_token_id=None, max_new_tokens=30),
    "a static cache": _call(cache_implementation="static"),
    "no cache": _call(use_cache=False),
    "a cache that was filled before": _cache,
    "a dictionary with scores and logits": _call(**DICT),
    "a dictionary of a sampled batch": _batch(LEFT, **DICT, **SEEDED),
    "attentions and hidden states": _call(output_attentions=True, output_hidden_states=True, **DICT),
    "repetition penalty": _call(repetition_penalty=1.7),
    "no repeated pairs": _call(no_repeat_ngram_size=2, max_new_tokens=20),
    "minimal length": _call(min_new_tokens=6, eos_token_id=list(range(2, 40))),
    "bad words": _call(bad_words_ids=[[36], [22, 42], [8]]),
    "suppressed and forced tokens": _call(suppress_tokens=[27, 36], forced_eos_token_id=2),
    "biased sequences": _call(sequence_bias={(9,): 4.0, (4, 5): -3.0}),
    "renormalised scores": _call(renormalize_logits=True, remove_invalid_values=True, **DICT),
    "guidance": _call(guidance_scale=1.5),
    "a watermark": _call(watermarking_config={"greenlist_ratio": 0.25, "bias": 2.5}),
    "allowed tokens by a function": _call(prefix_allowed_tokens_fn=lambda row, ids: list(range(4, 20))),
    "a processor of one's own": _call(logits_processor=LogitsProcessorList([Shift()]), **DICT),
    "a processor that writes into the scores": _call(
        logits_processor=LogitsProcessorList([Spoil()]), repetition_penalty=1.2, **DICT
    ),
    "a processor that writes, sampled": _call(logits_processor=LogitsProcessorList([Spoil(), Shift()]), **DICT,
                                              **SEEDED),
    "a plain list of processors": _call(logits_processor=[Spoil()]),
    "a list of processors of its own class": _call(logits_processor=OwnList([Shift()])),
    "stopping criteria": _batch(LEFT, stopping_criteria=[Enough()], max_new_tokens=30),
    "stop strings": lambda model: (
        (models.tensor(),), {"stop_strings": ["s", "xF"], "tokenizer": models.letters(), "max_new_tokens": 30}
    ),
    "prompt lookup": lambda model: (
        (models.tensor([5, 6, 7, 5, 6, 7, 5, 6]),), {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
    ),
    "an assistant": lambda model: ((models.tensor(),), {"assistant_model": _assistant(model), "max_new_tokens": 12}),
    "a loop of one's own": _call(custom_generate=_own_loop),
    "embeddings": lambda model: ((), {"inputs_embeds": _embeds(model), "max_new_tokens": 8}),
    "embeddings with ids": lambda model: (
        (), {"inputs_embeds": _embeds(model), "input_ids": models.tensor(), "max_new_tokens": 8}
    ),
    "ids by keyword": lambda model: ((), {"input_ids": models.tensor(), "max_new_tokens": 8}),
    "inputs by keyword": lambda model: ((), {"inputs": models.tensor(), "max_new_tokens": 8}),
    "no input at all": lambda model: ((), {"max_new_tokens": 8}),
    "a configuration by position": lambda model: ((models.tensor(), _config(model)), {}),
    "a configuration by keyword": lambda model: ((models.tensor(),), {"generation_config": _config(model, top_k=7)}),
    "a configuration and settings over it": lambda model: (
        (models.tensor(),), {"generation_config": _config(model, do_sample=True), "temperature": 0.4}
    ),
    "maximal length": lambda model: ((models.tensor(),), {"max_length": 11}),
    "maximal time": _call(max_time=600.0),
    "nothing but ids": lambda model: ((models.tensor(),), {}),
    "a streamer": lambda model: ((models.tensor(),), {"streamer": Gatherer(), "max_new_tokens": 8}),
    "a streamer, sampled": lambda model: ((models.tensor(),), {"streamer": Gatherer(), "max_new_tokens": 8, **SEEDED}),
}  # fmt: skip
# Ways to call that an encoder-decoder knows.
ENCODER_DECODER: dict[str, Case] = {
    "greedy": _call(),
    "sampling": _call(temperature=1.3, **SEEDED),
    "beams": _call(num_beams=3, num_return_sequences=2, **DICT),
    "a padded batch": _batch(RIGHT, **DICT),
    "padding without a mask": lambda model: ((models.tensor(*RIGHT),), {"max_new_tokens": 8}),
    "a decoder's own start": _call(decoder_input_ids=torch.tensor([[0, 17, 18]])),
    "outputs of the encoder": lambda model: (
        (), {"encoder_outputs": model.get_encoder()(models.tensor()), "max_new_tokens": 8}
    ),
    "no n-gram of the prompt": _call(encoder_no_repeat_ngram_size=1, encoder_repetition_penalty=1.3),
    "minimal length, forced start": _call(min_new_tokens=5, forced_bos_token_id=9),
    "a streamer": lambda model: ((models.tensor(),), {"streamer": Gatherer(), "max_new_tokens": 8}),
    "no cache": _call(use_cache=False, **DICT),
    "nothing but ids": lambda model: ((models.tensor(),), {}),
}  # fmt: skip
CASES = [(kind, name) for kind in ("llama", "gpt2") for name in DECODER] + [("t5", name) for name in ENCODER_DECODER]


def _assistant(model: Any) -> Any:
    """Make a smaller model that agrees now and then: the same one with its last layer silenced."""
    helper = models.MODELS["llama" if "Llama" in type(model).__name__ else "gpt2"]()
    helper.load_state_dict(model.state_dict())
    with torch.no_grad():
        list(helper.parameters())[-3].mul_(0.9)
    return helper


pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


@pytest.fixture(scope="module")
def zoo() -> dict[str, Any]:
    return {kind: make() for kind, make in models.MODELS.items()}


def _case(kind: str, name: str) -> Case:
    return (ENCODER_DECODER if kind == "t5" else DECODER)[name]


class Outcome:
    """All that a caller can see of one call."""

    def __init__(self, model: Any, case: Case) -> None:
        args, kwargs = case(model)
        before = {name: value.clone() for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        torch.manual_seed(11)
        random.seed(12)
        np.random.seed(13)  # noqa: NPY002 - the global generator is what must not move
        self.result = model.generate(*args, **kwargs)
        self.torch = torch.get_rng_state()
        self.python = random.getstate()
        self.numpy = np.random.get_state()  # noqa: NPY002 - as above
        self.streamed = getattr(kwargs.get("streamer"), "seen", [])
        self.config = model.generation_config.to_dict()
        for name, value in before.items():
            assert torch.equal(value, kwargs[name]), f"{name} was written to"


def test_the_table_has_the_ways_that_are_promised() -> None:
    assert len(CASES) >= 100
    assert len(DECODER) >= 40


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind}-{name}" for kind, name in CASES])
def test_a_recorded_call_equals_a_bare_one_bit_for_bit(zoo: dict[str, Any], kind: str, name: str) -> None:
    model, case = zoo[kind], _case(kind, name)
    bare = Outcome(model, case)

    provenance.wrap(model)
    wrapped = Outcome(model, case)
    provenance.uninstrument()
    provenance.instrument()
    instrumented = Outcome(model, case)

    recorder = recorders.current()
    assert recorder is not None
    assert (recorder.errors, recorder.records) == (0, 4)
    for outcome in (wrapped, instrumented):
        _same(bare.result, outcome.result, "result")
        _same(bare.streamed, outcome.streamed, "stream")
        assert torch.equal(bare.torch, outcome.torch)
        assert bare.python == outcome.python
        assert str(bare.numpy) == str(outcome.numpy)
        assert bare.config == outcome.config


@pytest.mark.parametrize(("kind", "wrong"), [("llama", {"no_such_setting": 1}), ("gpt2", {"max_new_tokens": -1}),
                                             ("t5", {"num_beams": 0})])  # fmt: skip
def test_a_refused_call_is_refused_with_the_same_words(zoo: dict[str, Any], kind: str, wrong: dict[str, Any]) -> None:
    model = zoo[kind]
    with pytest.raises(Exception, match=r"\w") as bare:
        model.generate(models.tensor(), **wrong)
    provenance.wrap(model)
    with pytest.raises(type(bare.value)) as wrapped:
        model.generate(models.tensor(), **wrong)
    assert str(wrapped.value) == str(bare.value)
    assert wrapped.value.__cause__ is None
    assert wrapped.value.__context__ is None


@pytest.mark.parametrize("how", ["wrap", "instrument"])
def test_the_very_object_that_the_model_returned_is_returned(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Token:
        """What no library returns."""

    returned = Token()
    monkeypatch.setattr(transformers.GenerationMixin, "generate", lambda self, *args, **kwargs: returned)
    model = models.llama()
    if how == "wrap":
        provenance.wrap(model)
    else:
        provenance.instrument()
    assert model.generate(models.tensor()) is returned
    recorder = recorders.current()
    assert recorder is not None
    assert (recorder.errors, recorder.records) == (0, 2)


def test_what_is_compared_was_observed_and_not_passed_by(zoo: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The observer's own steps are counted: as many as tokens, in one call of each kind."""
    steps: list[int] = []
    finish = observe._finish

    def counted(state: Any, model: Any, result: Any) -> None:
        finish(state, model, result)
        steps.append(state.observer.steps)

    monkeypatch.setattr(observe, "_finish", counted)
    for model in zoo.values():
        provenance.wrap(model)
        model.generate(models.tensor(), max_new_tokens=6, eos_token_id=None)
    assert steps == [6, 6, 6]


def _same(one: Any, other: Any, place: str) -> None:
    """Compare results down to the bits of every tensor, those of a cache included."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, place
        assert one.shape == other.shape, place
        assert one.detach().numpy().tobytes() == other.detach().numpy().tobytes(), place
    elif isinstance(one, Mapping):
        assert list(one) == list(other), place
        for key in one:
            _same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), place
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            _same(left, right, f"{place}[{number}]")
    elif hasattr(one, "layers"):
        for number, (left, right) in enumerate(zip(one.layers, other.layers, strict=True)):
            _same(getattr(left, "keys", None), getattr(right, "keys", None), f"{place}.keys[{number}]")
            _same(getattr(left, "values", None), getattr(right, "values", None), f"{place}.values[{number}]")
    elif hasattr(one, "self_attention_cache"):
        _same(one.self_attention_cache, other.self_attention_cache, place)
        _same(one.cross_attention_cache, other.cross_attention_cache, place)
    else:
        assert one == other, place
