"""Engines under observation: everything is written down, the very objects come back, and nothing of ours gets in the way."""

import gc
import importlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import provenance
from provenance import recorder as recorders
from provenance.capture import answers, runtimes
from provenance.errors import UsageError
from provenance.facts import ROLE, End, Run, State
from provenance.integrity import values
from tests.fakes import engines as fakes
from tests.fakes import models


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    fakes.load(monkeypatch, "vllm", "sglang", "llama_cpp", "tensorrt_llm")


def _only(db: Path) -> Run:
    (run,) = models.runs(db)
    return run


def _values(run: Run) -> dict[str, Any]:
    return {name: item.value for name, item in run.fields.items()}


# -- what is written down ---------------------------------------------------------------------------


def test_vllm_is_recorded_prompt_by_prompt(db: Path) -> None:
    llm = fakes.LLM()
    assert provenance.wrap(llm) is llm
    params = fakes.SamplingParams(temperature=0.0, top_p=0.5, max_tokens=4, n=2, logprobs=1, seed=9)
    results = llm.generate(["one", {"prompt_token_ids": [5, 6]}], params)
    run = _only(db)
    assert (run.runtime, run.operation, run.status) == ("vllm", "generate", "ok")
    first, _, third, _ = run.sequences
    assert [(item.row, item.ret) for item in run.sequences] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert first.input_value == {"prompt": "one"}
    assert first.input_text == "one"
    assert first.input_ids == tuple(map(ord, "one"))
    assert (third.input_ids, third.input_value) == ((5, 6), None)
    assert first.output_ids == tuple(results[0].outputs[0].token_ids)
    assert (first.output_text, first.finish) == ("text 0", "length")
    assert first.no_evidence == "the engine gives no logits"
    fields = _values(run)
    assert fields["vllm.sampling.temperature"] == 0.0
    assert fields["vllm.sampling.top_p"] == 1.0  # in force, not as asked: vLLM resets it in greedy decoding
    assert run.fields["vllm.sampling.max_tokens"].source == "call"
    assert run.fields["vllm.sampling.min_p"].source == "library"
    assert (fields["generation.mode"], fields["generation.do_sample"]) == ("greedy_search", False)
    assert fields["vllm.cache_config.block_size"] == 16
    assert fields["seed.request"] == 9
    assert fields["batch.prefix_cache_hit_tokens"] == [3, 3]
    assert run.fields["batch.size"].state is State.UNKNOWN
    assert run.fields["weights.loaded_root"].reason.startswith("vllm holds its weights itself")


def test_settings_that_nobody_gave_are_those_of_the_checkpoint(db: Path) -> None:
    provenance.wrap(fakes.LLM()).generate("one")
    run = _only(db)
    assert (run.fields["vllm.sampling.top_k"].value, run.fields["vllm.sampling.top_k"].source) == (20, "model")
    assert run.fields["generation.do_sample"].value is True


def test_settings_that_differ_from_prompt_to_prompt_are_kept_as_a_list(db: Path) -> None:
    many = [fakes.SamplingParams(temperature=0.0, max_tokens=2), fakes.SamplingParams(temperature=0.9, max_tokens=2)]
    provenance.wrap(fakes.LLM()).generate(["a", "b"], many)
    run = _only(db)
    assert run.fields["vllm.sampling.temperature"].value == [0.0, 0.9]
    assert run.fields["vllm.sampling.max_tokens"].value == 2
    assert run.fields["generation.do_sample"].state is State.UNKNOWN


def test_a_conversation_is_one_run_and_tools_and_schemas_are_no_fields(db: Path) -> None:
    llm = provenance.wrap(fakes.LLM())
    tools = [{"type": "function", "function": {"name": "private_tool"}}]
    llm.chat(
        [{"role": "user", "content": "hi"}], fakes.SamplingParams(structured_outputs={"regex": "pri[v]ate"}), tools
    )
    run = _only(db)  # generate, which chat calls, is no run of its own
    assert run.operation == "chat"
    assert run.sequences[0].input_value == {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    assert run.fields["input.tools_digest"].value.startswith("hmac:")  # type: ignore[attr-defined]
    assert run.fields["vllm.sampling.structured_outputs"].value.startswith("hmac:")  # type: ignore[attr-defined]
    assert "pri" not in repr([item.value for item in run.fields.values() if item.name.startswith("vllm.sampling")])


def test_sglang_is_recorded_whole_in_batches_and_streamed(db: Path) -> None:
    engine = provenance.wrap(fakes.Engine())
    engine.generate("ab", {"temperature": 0, "max_new_tokens": 3})
    engine.generate(["ab", "cd"], {"temperature": 0.7})
    pieces = list(engine.generate(input_ids=[1, 2], sampling_params={"temperature": 0.7}, stream=True))
    assert len(pieces) == 3
    whole, batch, streamed = models.runs(db)
    assert whole.sequences[0].output_ids == tuple(fakes.tokens("ab", 3))
    assert (whole.sequences[0].output_text, whole.sequences[0].finish) == ("abc", "eos")
    assert (whole.fields["sglang.sampling.temperature"].reason, whole.fields["sglang.tp_size"].value) == (
        "requested",
        1,
    )
    assert whole.fields["generation.do_sample"].value is False
    assert [item.row for item in batch.sequences] == [0, 1]
    assert streamed.sequences[0].input_ids == (1, 2)
    assert streamed.sequences[0].output_ids == tuple(fakes.tokens([1, 2], 3))


def test_tensorrt_llm_is_recorded(db: Path) -> None:
    result = provenance.wrap(fakes.TensorLLM()).generate("ab", fakes.SamplingParams(max_tokens=2))
    run = _only(db)
    assert (run.runtime, run.sequences[0].output_ids) == ("tensorrt_llm", tuple(result.outputs[0].token_ids))
    assert run.fields["tensorrt_llm.sampling.max_tokens"].value == 2
    assert run.fields["tensorrt_llm.attn_backend"].value == "TRTLLM"


def test_llama_cpp_is_recorded_through_all_its_doors(db: Path, tmp_path: Path) -> None:
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"weights")
    llm = provenance.wrap(fakes.Llama(str(weights), seed=0))
    llm("hello", temperature=0.0)
    llm.create_completion("hello", seed=4, top_k=40)
    assert len(list(llm("hello", stream=True))) == 3
    llm.create_chat_completion([{"role": "user", "content": "hey"}])
    called, second, streamed, chat = models.runs(db)
    assert (called.operation, called.sequences[0].input_value) == ("create_completion", {"prompt": "hello"})
    assert called.sequences[0].input_ids == tuple(map(ord, "hello"))
    assert called.sequences[0].finish == "length"
    assert called.sequences[0].output_text == "".join(chr(97 + t % 26) for t in fakes.tokens("hello", 3))
    assert called.fields["llama_cpp.sampling.temperature"].source == "call"
    assert (called.fields["llama_cpp.sampling.top_k"].value, called.fields["llama_cpp.sampling.top_k"].source) == (
        40,
        "library",
    )
    assert called.fields["seed.llama_cpp"].value == 0xFFFFFFFF  # a seed of 0 is replaced by the random one
    assert (called.fields["llama_cpp.prefix_reuse"].value, second.fields["llama_cpp.prefix_reuse"].value) == (0, 5)
    assert (second.fields["seed.llama_cpp"].value, second.fields["seed.request"].value) == (4, 4)
    assert streamed.sequences[0].output_text == called.sequences[0].output_text
    assert streamed.sequences[0].output_key == called.sequences[0].output_key
    assert (chat.operation, chat.fields["llama_cpp.sampling.temperature"].value) == ("create_chat_completion", 0.2)
    assert chat.fields["weights.files_root"].state is State.VALUE
    assert chat.fields["weights.loaded_root"].reason.startswith("llama_cpp holds its weights itself")


def test_logprobs_are_kept_beside_the_output(db: Path) -> None:
    provenance.wrap(fakes.LLM()).generate("a", fakes.SamplingParams(max_tokens=2, logprobs=1))
    (end,) = (record for record in models.journal(db) if isinstance(record, End))
    (kept,) = (item for item in end.output.payloads if item.role == ROLE["evidence.logprobs"])
    assert values.decode(kept.data) == [[[token, -0.5, 1]] for token in fakes.tokens([97], 2)]


# -- calls that do not end well ---------------------------------------------------------------------


def test_a_call_that_raises_raises_the_same(db: Path) -> None:
    llm = fakes.LLM()
    with pytest.raises(ValueError, match="decoder prompt") as bare:
        llm.generate({"prompt_token_ids": []})
    with pytest.raises(ValueError, match="decoder prompt") as raised:
        provenance.wrap(llm).generate({"prompt_token_ids": []})
    assert str(raised.value) == str(bare.value)
    run = _only(db)
    assert (run.status, run.error) == ("error", "ValueError: The decoder prompt cannot be empty")


def test_wrong_arguments_are_pythons_own_error_and_no_run(db: Path) -> None:
    with pytest.raises(TypeError, match="nonsense"):
        provenance.wrap(fakes.LLM()).generate("a", nonsense=1)
    assert recorders._state["recorder"] is None or models.runs(db) == []


@pytest.mark.parametrize("how", ["begun", "never begun", "closed", "fails"])
def test_a_stream_that_is_not_read_to_its_end_says_how(how: str, db: Path) -> None:
    stream = provenance.wrap(fakes.Llama())("x" * (99 if how == "fails" else 2), stream=True)
    assert isinstance(stream, types.GeneratorType)
    if how == "fails":
        with pytest.raises(ValueError, match="exceed context window"):
            next(stream)
    elif how != "never begun":
        next(stream)
    if how == "closed":
        stream.close()
    del stream
    gc.collect()
    assert _only(db).status == ("error" if how == "fails" else "abandoned")


# -- on and off -------------------------------------------------------------------------------------


def test_wrapping_twice_is_wrapping_once_and_uninstrument_takes_all_off(db: Path) -> None:
    llm, other = fakes.LLM(), fakes.Llama()
    own = other.create_completion
    vars(other)["create_completion"] = own  # somebody's own
    provenance.wrap(provenance.wrap(llm))
    provenance.wrap(other)
    llm.generate("a")
    assert len(models.runs(db)) == 1
    provenance.uninstrument(llm)
    assert vars(llm).keys() == {"llm_engine"}
    provenance.uninstrument()
    assert vars(other)["create_completion"] is own
    llm.generate("a")
    other("a")
    assert len(models.runs(db)) == 1


def test_a_changed_setting_is_another_load(db: Path) -> None:
    llm = provenance.wrap(fakes.LLM())
    llm.generate("a")
    llm.generate("a")
    llm.llm_engine.vllm_config.cache_config.enable_prefix_caching = False
    llm.generate("a")
    one, two, three = models.runs(db)
    assert one.digests["model"] == two.digests["model"] != three.digests["model"]
    assert three.fields["vllm.cache_config.enable_prefix_caching"].value is False


def test_a_runtime_of_an_installed_package_is_asked_and_one_that_fails_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Point:
        def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
            self.name, self.function = name, function

        def load(self) -> Any:
            return self.function

    def broken(model: Any) -> Any:
        raise LookupError(type(model).__name__)

    points = [Point("broken", broken), Point("mine", lambda model: ("seen", model) if model == 5 else None)]
    monkeypatch.setattr(runtimes, "entry_points", lambda group: points if group == "provenance.runtimes" else [])
    found: Any = provenance.wrap(5)
    assert found == ("seen", 5)
    assert [record.getMessage() for record in caplog.records] == [
        "provenance could not use the runtime broken: LookupError: int"
    ]
    with pytest.raises(UsageError, match="has no generate"):
        provenance.wrap("text")


# -- never into the call ----------------------------------------------------------------------------

DOORS = {
    "runtimes.wrap_engine", "runtimes.by_entry_point", "runtimes.put_on", "runtimes.take_off", "runtimes.observed",
    "runtimes._pieces", "runtimes._declared",
}  # fmt: skip


def _failpoints() -> Iterator[tuple[str, Any, str]]:
    for room in ("runtimes", "answers"):
        module = importlib.import_module(f"provenance.capture.{room}")
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                yield f"{room}.{name}", module, name
            elif (
                isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, (tuple, list))
            ):
                yield from (
                    (f"{room}.{name}.{inner}", value, inner) for inner in vars(value) if callable(vars(value)[inner])
                )


FAILPOINTS = [point for point in _failpoints() if point[0] not in DOORS]


def _program() -> list[Any]:
    llm, engine, llama = map(provenance.wrap, (fakes.LLM(), fakes.Engine(), fakes.Llama()))
    params = fakes.SamplingParams(max_tokens=2, logprobs=1, temperature=0.0)
    seen = [
        llm.generate(["a", {"prompt_token_ids": [3]}], params, lora_request=types.SimpleNamespace(lora_name="l")),
        llm.generate("a"), llm.chat([{"role": "user", "content": "b"}]), engine.generate("ab", {"temperature": 0}),
        list(engine.generate("ab", stream=True)), llama("abc"), llama("abd", stop=["x"]), list(llama("ab", stream=True)),
        llama.create_chat_completion([{"role": "user", "content": "b"}]),
        provenance.wrap(fakes.TensorLLM()).generate("ab"), provenance.wrap(fakes.TensorLLM()).generate(["ab"], params),
        llm.chat([{"role": "user", "content": "b"}], tools=[{"type": "function"}]),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="exceed"):
        llama("x" * 99)
    return seen


@pytest.mark.parametrize(("name", "owner", "attribute"), FAILPOINTS, ids=[name for name, _, _ in FAILPOINTS])
def test_whatever_of_ours_breaks_the_engine_does_not_notice(
    name: str, owner: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVENANCE_DISABLED", "1")
    expected = _program()
    monkeypatch.delenv("PROVENANCE_DISABLED")
    recorders._state.update(recorder=None, settings=None, refused="")
    fired = []

    def broken(*arguments: Any, **options: Any) -> Any:
        fired.append(name)
        raise RuntimeError(name)

    with monkeypatch.context() as patched:
        patched.setattr(owner, attribute, broken)
        for table in (runtimes.SETTINGS, answers.ANSWERS):
            for key, value in list(table.items()):
                if getattr(value, "__name__", "") == attribute:
                    patched.setitem(table, key, broken)
        seen = _program()
    assert repr(seen) == repr(expected)
    assert fired, "a failpoint that is never passed proves nothing"
