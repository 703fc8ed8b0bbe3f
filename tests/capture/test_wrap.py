"""Putting the observer on and taking it off, and what it must never do to the program around it."""

import asyncio
import contextvars
import copy
import functools
import gc
import importlib
import inspect
import logging
import pickle
import sqlite3
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import provenance
from provenance import opening
from provenance import recorder as recorders
from provenance.capture import call as calls
from provenance.capture import wrap as wrapping
from provenance.errors import UsageError
from provenance.facts import End, Run, Start
from tests.conftest import Command
from tests.fakes import models

MIXIN = transformers.GenerationMixin


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


def _records() -> int:
    recorder = recorders._state["recorder"]
    return recorder.records if recorder is not None else 0


def _bare(**settings: Any) -> Any:
    return models.llama().generate(models.tensor(), max_new_tokens=6, **settings)


def _parents(db: Path) -> dict[str, str | None]:
    """Return the operation of every run with that of its parent."""
    with closing(sqlite3.connect(db)) as connection:
        rows = connection.execute("select run_id, parent_run, operation from runs").fetchall()
    names = {run: operation for run, _, operation in rows}
    return {operation: names.get(parent) for _, parent, operation in rows}


# -- on and off -------------------------------------------------------------------------------------


def test_wrap_returns_the_model_and_a_second_wrap_changes_nothing() -> None:
    model = models.llama()
    assert provenance.wrap(model) is model
    first = vars(model)["generate"]
    assert provenance.wrap(model) is model
    assert vars(model)["generate"] is first
    model.generate(models.tensor(), max_new_tokens=2)
    assert _records() == 2


def test_instrument_twice_and_wrap_on_top_record_a_call_once() -> None:
    model = models.llama()
    provenance.instrument()
    first = MIXIN.generate
    provenance.instrument()
    assert MIXIN.generate is first
    provenance.wrap(model).generate(models.tensor(), max_new_tokens=2)
    assert _records() == 2


def test_uninstrument_puts_the_very_functions_back() -> None:
    owners = [(MIXIN, "generate"), (MIXIN, "_get_logits_processor"), (transformers.Pipeline, "__init__")]
    before = [vars(owner)[name] for owner, name in owners]
    provenance.instrument()
    assert all(vars(owner)[name] is not function for (owner, name), function in zip(owners, before, strict=True))
    provenance.uninstrument()
    assert all(vars(owner)[name] is function for (owner, name), function in zip(owners, before, strict=True))


def test_uninstrument_leaves_alone_what_somebody_else_patched_over_it() -> None:
    original = MIXIN.generate
    expected = _bare()
    provenance.instrument()
    ours = MIXIN.generate

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    MIXIN.generate = other
    try:
        provenance.uninstrument()
        assert MIXIN.generate is other
        assert torch.equal(models.llama().generate(models.tensor(), max_new_tokens=6), expected)
    finally:
        MIXIN.generate = original


def test_uninstrument_of_one_model_leaves_the_others_on() -> None:
    one, other = provenance.wrap(models.llama()), provenance.wrap(models.llama())
    provenance.uninstrument(one)
    assert "generate" not in vars(one)
    one.generate(models.tensor(), max_new_tokens=2)
    assert _records() == 0
    other.generate(models.tensor(), max_new_tokens=2)
    assert _records() == 2


def _bound(model: Any) -> Any:
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).generate(self, *args, **{**kwargs, "max_new_tokens": 3})

    return types.MethodType(generate, model)


def _closed(model: Any) -> Any:
    inherited = model.generate
    return lambda *args, **kwargs: inherited(*args, **{**kwargs, "max_new_tokens": 3})


@pytest.mark.parametrize("make", [_bound, _closed])
def test_a_generate_that_stands_on_the_model_itself_is_called_and_put_back(
    make: Callable[[Any], Any], db: Path
) -> None:
    model = models.llama()
    own = model.generate = make(model)
    result = provenance.wrap(model).generate(models.tensor(), max_new_tokens=9)
    assert result.shape[1] == 5 + 3
    assert models.last(db).sequences[0].output_ids == tuple(result[0, 5:].tolist())
    assert models.last(db).sequences[0].input_ids == tuple(models.PROMPT[0])
    provenance.uninstrument(model)
    assert vars(model)["generate"] is own
    assert _records() == 2


def test_a_deep_copy_generates_with_its_own_weights_and_is_recorded_as_itself(db: Path) -> None:
    model = provenance.wrap(models.llama())
    model.generate(models.tensor(), max_new_tokens=6)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.copy_(models.llama(3).lm_head.weight)
    expected = models.llama()
    with torch.no_grad():
        expected.lm_head.weight.copy_(models.llama(3).lm_head.weight)
    result = twin.generate(models.tensor(), max_new_tokens=6)
    assert twin.generate.__self__ is twin
    assert torch.equal(result, expected.generate(models.tensor(), max_new_tokens=6))
    first, second = models.runs(db)
    assert first.fields["weights.loaded_root"] != second.fields["weights.loaded_root"]
    assert second.fields["weights.loaded_root"].known
    provenance.wrap(twin)
    provenance.uninstrument(twin)
    assert "generate" not in vars(twin)


def test_a_pickled_model_comes_back_working_and_unbound_from_the_old() -> None:
    model = provenance.wrap(models.llama())
    twin = pickle.loads(pickle.dumps(model))
    assert twin.generate.__self__ is twin
    del model
    assert torch.equal(twin.generate(models.tensor(), max_new_tokens=6), _bare())
    assert torch.equal(provenance.wrap(twin).generate(models.tensor(), max_new_tokens=6), _bare())


def test_a_wrapped_generate_looks_like_the_one_it_wraps() -> None:
    model = provenance.wrap(models.llama())
    assert inspect.signature(model.generate) == inspect.signature(models.llama().generate)
    assert model.generate.__doc__ == MIXIN.generate.__doc__
    assert model.generate.__name__ == "generate"


@pytest.mark.parametrize("thing", [object(), torch.nn.Linear(2, 2), 7])
def test_what_cannot_generate_is_refused_in_one_sentence(thing: Any) -> None:
    with pytest.raises(UsageError, match=r"has no generate; wrap\(\) takes a transformers model or pipeline"):
        provenance.wrap(thing)


# -- pipelines --------------------------------------------------------------------------------------


def _pipeline(chat: bool = False) -> Any:
    return transformers.pipeline("text-generation", model=models.llama(), tokenizer=models.letters(chat), device="cpu")


@pytest.mark.parametrize("how", ["wrap", "instrument before", "instrument after"])
def test_a_pipeline_is_recorded_with_its_text(how: str, db: Path) -> None:
    if how == "instrument before":
        provenance.instrument()
    pipe = _pipeline()
    if how == "wrap":
        assert provenance.wrap(pipe) is pipe
    elif how == "instrument after":
        provenance.instrument()
    (answer,) = pipe("Hello, room", max_new_tokens=7, do_sample=False)
    (run,) = models.runs(db)
    assert run.sequences[0].input_text == "Hello, room"
    assert answer["generated_text"] == f"Hello, room{run.sequences[0].output_text}"
    assert run.fields["tokenizer.class"].known


def test_chat_messages_are_recorded_as_the_model_saw_them(db: Path) -> None:
    pipe = provenance.wrap(_pipeline(chat=True))
    (answer,) = pipe([{"role": "user", "content": "What now?"}], max_new_tokens=5, do_sample=False)
    (run,) = models.runs(db)
    assert run.sequences[0].input_text == "user: What now?\n"
    assert answer["generated_text"][-1]["content"] == run.sequences[0].output_text
    assert str(run.fields["chat_template.sha256"].value).startswith("sha256:")
    provenance.uninstrument(pipe)
    pipe("again", max_new_tokens=2, do_sample=False)
    assert len(models.runs(db)) == 1


def test_instrument_asks_no_object_for_its_class(db: Path) -> None:
    """Proxies of web frameworks raise outside a request, and some modules warn, when asked for ``__class__``."""

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise RuntimeError("working outside of a request")

        @__class__.setter
        def __class__(self, value: Any) -> None:
            raise RuntimeError("working outside of a request")

    alive = [Proxy(), {"kept": Proxy()}]
    pipe = _pipeline()
    provenance.instrument()
    pipe("abc", max_new_tokens=2, do_sample=False)
    assert models.last(db).sequences[0].input_text == "abc"
    assert len(alive) == 2


# -- classes with a loop of their own, imports ------------------------------------------------------


def test_a_class_with_a_generate_of_its_own_is_wrapped_where_it_stands(db: Path) -> None:
    class Own(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            """Call the inherited loop twice: one call, one run."""
            half = super().generate(input_ids, **kwargs)
            return super().generate(half, **kwargs)

    model = models.llama()
    model.__class__ = Own
    result = provenance.wrap(model).generate(models.tensor(), max_new_tokens=3)
    (run,) = models.runs(db)
    assert run.sequences[0].output_ids == tuple(result[0, 5:].tolist())[-len(run.sequences[0].output_ids or ()) :]
    assert run.sequences[0].no_evidence == "Own has a generate of its own"


LATER = """
import json, os, sys
import provenance
provenance.instrument()
assert "transformers" not in sys.modules and "torch" not in sys.modules
from tests.fakes import models                      # imports transformers now
from transformers import GenerationMixin
assert hasattr(GenerationMixin.generate, "provenance_original")
import transformers.models.musicgen.modeling_musicgen as musicgen   # a class with a generate of its own
own = [item for item in vars(musicgen).values() if isinstance(item, type) and "generate" in vars(item)]
assert own and all(hasattr(vars(item)["generate"], "provenance_original") for item in own), own
import transformers
pipe = transformers.pipeline("text-generation", model=models.llama(), tokenizer=models.letters(), device="cpu")
pipe("abc", max_new_tokens=3, do_sample=False)
assert type(musicgen.__spec__.loader).__name__ == "SourceFileLoader"
provenance.uninstrument()
assert all(not hasattr(vars(item)["generate"], "provenance_original") for item in own)
assert not hasattr(GenerationMixin.generate, "provenance_original")
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("provenance")]
"""


def test_instrument_first_and_import_later(python: Command, db: Path) -> None:
    ran = python(LATER)
    assert (ran.returncode, ran.stderr) == (0, ran.stderr)
    assert "Error" not in ran.stderr
    assert "provenance" not in ran.stderr
    assert not provenance.flush() or True
    (run,) = models.runs(db)
    assert (run.status, run.sequences[0].input_text) == ("ok", "abc")


# -- never into the call ----------------------------------------------------------------------------

# Called by the program itself and not inside a call of it, or carrying the user's own code step by step.
DOORS = {
    "call.run", "call.Labels.__init__", "call.Labels.run_id", "call.Labels.set_field", "call._is_plain", "face.init", "face.flush", "face.environment", "functions.record",
    "functions.record_as", "functions._plain", "functions._coroutine", "functions._generator",
    "functions._async_generator", "functions._awaited", "functions.Steps.__init__", "functions.Steps.__iter__",
    "functions.Steps.__next__", "functions.Steps._step", "functions.Steps.close", "functions.Steps.send",
    "functions.Steps.throw", "observe.recorded", "observe.seam", "wrap._pipeline_init",
    "wrap.wrap", "wrap._inside", "wrap._plain", "wrap.instrument", "wrap.uninstrument", "wrap._patch", "wrap._install_seam",
    "wrap._generators", "wrap._remember_tokenizers", "wrap.watch", "wrap.unwatch", "wrap.Watcher.__init__",
    "wrap.Watcher.find_spec", "recorder.configure", "recorder.refused", "recorder.shutdown",
    "recorder.Harmless.__init__", "recorder.Harmless.__enter__", "recorder.Harmless.__exit__",
    "recorder.Recorder.flush", "recorder.Recorder.close",
}  # fmt: skip
# Not passed by a call: they run in a thread of ours, in a forked child, at an import or never.
BACKGROUND = {
    "wrap.Watcher._follow", "call.Call.partial", "call.Labels.__eq__", "call.Labels.__repr__",
    "call.Call._is_theirs", "call.Call.settings", "models.Job.run_files", "models.Models.look_at_engine", "models._covered",
    "models.Models.__init__", "models.Models.unlock", "models.Models.draft",
    "models.Models.prepare", "models.Models._read", "observe._names", "recorder.Recorder._tend",
    "recorder.Recorder._write_here", "recorder.Recorder.ensure_writer", "recorder.Recorder.failed",
    "recorder._after_fork", "recorder._before_fork", "recorder._forked", "opening.launch_writer", "opening.read_target", "wrap._loaded",
    # Where a level is not reached, or nothing is recorded: tests/capture/test_failure.py passes them.
    "recorder.Recorder._late", "recorder._unrecorded",
    # Under weights=files alone: tests/capture/test_models.py breaks it.
    "models.Job._inside",
}  # fmt: skip
# Passed when a journal is opened.
OPENING = {"recorder._open", "opening.about", "opening.keeping", "recorder.Recorder.__init__"}
ROOMS = ("call", "evidence", "face", "functions", "generation", "models", "observe", "transformers", "wrap")


def _failpoints() -> Iterator[tuple[str, Any, str]]:
    """List every function and method of the observing wing: its name, its owner and the attribute."""
    for module in [importlib.import_module(f"provenance.capture.{room}") for room in ROOMS] + [recorders, opening]:
        place = module.__name__.rpartition(".")[2]
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                yield f"{place}.{name}", module, name
            elif isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, tuple):
                for inner, method in vars(value).items():
                    if isinstance(method, (types.FunctionType, property)):
                        yield f"{place}.{name}.{inner}", value, inner


FAILPOINTS = [point for point in _failpoints() if point[0] not in DOORS]


class Broken(Exception):
    """What a failpoint raises."""


def _scores(model: Any) -> Any:
    return model.generate(models.tensor(), max_new_tokens=2, return_dict_in_generate=True, output_scores=True).scores


def _program(model: Any) -> list[Any]:
    """Do what the recorder sees: calls of all kinds, one of them failing, under whatever is broken."""

    @provenance.record
    def twice(number: int, token: str = "") -> int:
        return 2 * number if token else 0

    class Counter:
        step = 1

        @provenance.record
        def size(self, text: str) -> int:
            return len(text) * self.step

    @provenance.record
    async def later(number: int) -> int:
        return number + 1

    @provenance.record
    def count() -> Iterator[int]:
        yield from range(3)

    @provenance.record
    async def slowly() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def gather() -> list[int]:
        return [await later(1)] + [item async for item in slowly()]

    @provenance.record
    def fail() -> None:
        raise KeyError("mine")

    torch.manual_seed(0)
    with provenance.run(name="all", tags={"suite": "wrap"}):
        doubled = twice(4, "plain text") + Counter().size("large text " * 100_000)
    seen = [
        _scores(model),
        model.generate(models.tensor([0, 5], [6, 7]), max_new_tokens=2, do_sample=True, temperature=2.0),
        model.generate(models.tensor(), max_new_tokens=2, num_beams=2, tokenizer=models.letters()),
        model.generate(inputs_embeds=torch.ones(1, 2, 32), max_new_tokens=9, max_time=1e-9),
        model.generate(models.tensor(), max_new_tokens=2, attention_mask=torch.tensor([[1, 0, 1, 1, 1]])),
        model.generate(models.tensor(), max_new_tokens=2, logits_processor=[transformers.TemperatureLogitsWarper(1.5)]),
        model.generate(models.tensor(), max_new_tokens=2, custom_generate=lambda model, ids, **kwargs: torch.ones(1, 3)),
        torch.get_rng_state(),
        doubled, list(count()), asyncio.run(gather()),
    ]  # fmt: skip
    with pytest.raises(KeyError) as raised:
        fail()
    seen.append(str(raised.value))
    with pytest.raises(ValueError, match="strictly positive"):
        model.generate(models.tensor(), repetition_penalty=-1.0, max_new_tokens=2)
    return seen


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return _program(models.llama(num_hidden_layers=1))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("name", "owner", "attribute"), FAILPOINTS, ids=[name for name, _, _ in FAILPOINTS])
def test_whatever_of_ours_breaks_the_program_does_not_notice(
    name: str, owner: Any, attribute: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.llama(num_hidden_layers=1)
    provenance.instrument()
    recorder = recorders.current()
    assert recorder is not None

    fired = []

    def broken(*arguments: Any, **options: Any) -> Any:
        fired.append(name)
        raise Broken(name)

    with monkeypatch.context() as patched:
        there = vars(owner)[attribute]
        for place in _holders(owner, attribute, there):
            patched.setattr(place, attribute, property(broken) if isinstance(there, property) else broken)
        if name in OPENING:  # when a journal is opened
            recorder.close()
            recorders._state["recorder"] = None
        _alike(_program(model), expected)
        for job in recorder.jobs:
            job.join(5)
    assert fired or name in BACKGROUND  # a failpoint that is never passed proves nothing
    _alike(_scores(model), expected[0])


def _holders(owner: Any, attribute: str, there: Any) -> list[Any]:
    """List the modules that imported a function by name, beside the one that defines it."""
    if isinstance(owner, type):
        return [owner]
    ours = [module for name, module in sys.modules.items() if name.startswith("provenance.")]
    return [module for module in ours if vars(module).get(attribute) is there]


def test_not_even_counting_a_failure_can_fail_into_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = provenance.wrap(models.llama())

    def broken(*arguments: Any) -> Any:
        raise Broken("twice")

    monkeypatch.setattr("provenance.capture.observe.read_outputs", broken)
    monkeypatch.setattr(recorders.Recorder, "failed", broken)
    assert torch.equal(model.generate(models.tensor(), max_new_tokens=6), _bare())


def _alike(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            _alike(left, right)
    else:
        assert one == other


def test_the_failpoints_are_all_of_ours() -> None:
    names = {name for name, _, _ in _failpoints()}
    assert names >= DOORS
    assert len(FAILPOINTS) >= 90


def test_a_failure_of_ours_is_counted_and_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = provenance.wrap(models.llama())

    def broken(*arguments: Any) -> Any:
        raise Broken("no inputs today")

    monkeypatch.setattr("provenance.capture.observe.read_inputs", broken)
    with caplog.at_level(logging.WARNING, "provenance"):
        for _ in range(3):
            model.generate(models.tensor(), max_new_tokens=2)
    recorder = recorders.current()
    assert recorder is not None
    assert recorder.errors == 3
    assert [record.getMessage() for record in caplog.records] == [
        "provenance could not record the start of a call: Broken: no inputs today; calls run on"
    ]


def test_an_interrupt_during_our_own_work_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    model = provenance.wrap(models.llama())

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("provenance.capture.observe.read_inputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate(models.tensor(), max_new_tokens=2)


def test_disabled_writes_nothing_and_changes_nothing(
    db: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROVENANCE_DISABLED", "1")
    model = provenance.wrap(models.llama())
    provenance.instrument()
    with caplog.at_level(logging.WARNING):
        assert torch.equal(model.generate(models.tensor(), max_new_tokens=6), _bare())
        assert provenance.record(lambda: 5)() == 5
    assert provenance.flush() is False
    assert not db.parent.exists()
    assert list(home.iterdir()) == []
    assert caplog.records == []


def _not_writable(place: Path) -> str:
    place.write_text("a file, where the spool should be")
    return str(place / "spool")


def _open_to_others(place: Path) -> str:
    place.mkdir(mode=0o755)
    return str(place)


def _link(place: Path) -> str:
    place.symlink_to(place.parent)
    return str(place)


@pytest.mark.parametrize("spoil", [_not_writable, _open_to_others, _link])
def test_a_spool_that_cannot_be_used_is_one_warning_and_calls_run_on(
    spoil: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROVENANCE_SPOOL", spoil(tmp_path / "spoiled"))
    with caplog.at_level(logging.WARNING):
        model = provenance.wrap(models.llama())
        provenance.instrument()
        for _ in range(3):
            assert torch.equal(model.generate(models.tensor(), max_new_tokens=6), _bare())
        assert provenance.record(lambda: 5)() == 5
    warnings = [record.getMessage() for record in caplog.records if record.name == "provenance"]
    assert len(warnings) == 1
    assert warnings[0].startswith("provenance records nothing in this process: the spool ")
    assert "PROVENANCE_SPOOL" in warnings[0] or "chmod 700" in warnings[0]
    assert recorders.refused() != ""


# -- any function -----------------------------------------------------------------------------------


def _only(db: Path) -> Run:
    (run,) = models.runs(db)
    return run


def test_a_function_is_recorded_with_arguments_and_result(db: Path) -> None:
    @provenance.record(name="adding")
    def add(left: int, *more: int, scale: float = 1.0) -> float:
        """Add them."""
        return (left + sum(more)) * scale

    assert add(1, 2, 3, scale=0.5) == 3.0
    assert (add.__name__, add.__doc__) == ("add", "Add them.")
    run = _only(db)
    assert (run.runtime, run.operation, run.status) == ("function", "adding", "ok")
    assert run.sequences[0].input_value == {"args": (1, 2, 3), "kwargs": {"scale": 0.5}}
    assert run.sequences[0].output_value == 3.0
    assert run.sequences[0].finish == "returned"


def test_arguments_are_those_of_the_moment_of_the_call(db: Path) -> None:
    @provenance.record
    def spoil(items: list[int]) -> list[int]:
        items.append(9)
        return items

    mine = [1]
    result = spoil(mine)
    mine.append(10)
    assert result is mine
    run = _only(db)
    assert run.sequences[0].input_value == {"args": ([1],)}
    assert run.sequences[0].output_value == [1, 9]


def test_a_function_that_raises_raises_the_same(db: Path) -> None:
    error = ValueError("not today")

    @provenance.record
    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="not today") as raised:
        fail()
    assert raised.value is error
    assert (error.__context__, error.__cause__) == (None, None)
    run = _only(db)
    assert (run.status, run.error) == ("error", "ValueError: not today")


class Hostile:
    """Objects that do harm when they are looked at."""

    def __repr__(self) -> str:
        raise RuntimeError("do not look at me")

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


def test_hostile_arguments_and_results_pass_through(db: Path) -> None:
    thing = Hostile()
    assert provenance.record(lambda item: item)(thing) is thing
    run = _only(db)
    assert run.status == "ok"
    assert "Hostile" in str(run.sequences[0].input_value)


def test_a_coroutine_is_recorded_when_it_ends(db: Path) -> None:
    @provenance.record
    async def add(left: int, right: int) -> int:
        await asyncio.sleep(0)
        return left + right

    assert inspect.iscoroutinefunction(add)
    assert asyncio.run(add(1, right=2)) == 3
    assert _only(db).sequences[0].output_value == 3


def test_a_cancelled_coroutine_is_aborted_and_still_cancelled(db: Path) -> None:
    @provenance.record
    async def forever() -> None:
        await asyncio.sleep(3600)

    async def program() -> bool:
        task = asyncio.create_task(forever())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert asyncio.run(program())
    assert _only(db).status == "aborted"


def test_a_dropped_coroutine_is_abandoned_whoever_closes_it(db: Path) -> None:
    @provenance.record
    async def waiting() -> None:
        await Never()

    class Never:
        def __await__(self) -> Generator[None, None, None]:
            yield

    for context in (contextvars.copy_context(), contextvars.copy_context()):
        item: Any = waiting()
        contextvars.copy_context().run(item.send, None)
        context.run(item.close)
    item = waiting()
    item.send(None)
    item.close()
    assert [run.status for run in models.runs(db)] == ["abandoned"] * 3


def test_a_generator_keeps_its_sends_its_throws_and_its_value(db: Path) -> None:
    @provenance.record
    def talk(first: str) -> Generator[str, str, str]:
        heard = yield first
        try:
            yield f"heard {heard}"
        except KeyError as error:
            yield f"caught {error.args[0]}"
        return "goodbye"

    assert inspect.isgeneratorfunction(talk)
    talking: Any = talk("hello")
    seen = [next(talking), talking.send("you"), talking.throw(KeyError("key"))]
    with pytest.raises(StopIteration) as over:
        next(talking)
    assert over.value.value == "goodbye"
    run = _only(db)
    assert run.sequences[0].output_value == seen == ["hello", "heard you", "caught key"]
    assert run.status == "ok"


def test_a_generator_that_is_dropped_is_abandoned_and_closes_its_own_things(db: Path) -> None:
    closed = []

    @provenance.record
    def numbers() -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    item = numbers()
    assert next(item) == 1
    del item
    gc.collect()
    assert closed == [True]
    assert _only(db).status == "abandoned"


def test_a_generator_that_raises_is_an_error(db: Path) -> None:
    @provenance.record
    def numbers() -> Iterator[int]:
        yield 1
        raise OSError("the well is dry")

    with pytest.raises(OSError, match="the well is dry"):
        list(numbers())
    assert _only(db).status == "error"


def test_an_exception_thrown_into_a_generator_comes_out_as_it_went_in(db: Path) -> None:
    @provenance.record
    def numbers() -> Iterator[int]:
        yield 1

    error, item = KeyError("mine"), numbers()
    next(item)
    with pytest.raises(KeyError) as raised:
        item.throw(error)  # type: ignore[attr-defined]
    assert raised.value is error
    assert _only(db).status == "error"


def test_an_async_generator_keeps_its_sends_and_its_throws(db: Path) -> None:
    @provenance.record
    async def talk() -> AsyncIterator[str]:
        heard = yield "hello"
        try:
            yield f"heard {heard}"
        except KeyError as error:
            yield f"caught {error.args[0]}"

    async def program() -> list[str]:
        talking: Any = talk()
        seen = [await anext(talking), await talking.asend("you"), await talking.athrow(KeyError("key"))]
        with pytest.raises(StopAsyncIteration):
            await anext(talking)
        return seen

    assert inspect.isasyncgenfunction(talk)
    assert asyncio.run(program()) == ["hello", "heard you", "caught key"]
    run = _only(db)
    assert (run.status, run.sequences[0].output_value) == ("ok", ["hello", "heard you", "caught key"])


@pytest.mark.parametrize("how", ["break", "cancel", "raise"])
def test_an_async_generator_that_does_not_end_says_how(how: str, db: Path) -> None:
    closed = []

    @provenance.record
    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.sleep(3600 if how == "cancel" else 0)
            raise OSError("the well is dry")
        finally:
            closed.append(True)

    async def read() -> None:
        items: Any = numbers()
        async for _ in items:
            if how == "break":
                break
        await items.aclose()

    async def program() -> None:
        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        if how == "cancel":
            task.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await task

    asyncio.run(program())
    assert closed == [True]
    assert _only(db).status == {"break": "abandoned", "cancel": "aborted", "raise": "error"}[how]


def test_wrong_arguments_begin_no_call_that_never_ends(db: Path) -> None:
    @provenance.record
    def numbers(count: int) -> Iterator[int]:
        yield from range(count)

    @provenance.record
    async def later(count: int) -> AsyncIterator[int]:
        yield count

    with pytest.raises(TypeError):
        list(numbers())  # type: ignore[call-arg]

    async def program() -> None:
        with pytest.raises(TypeError):
            await anext(later())  # type: ignore[call-arg]

    asyncio.run(program())
    assert [record for record in models.journal(db) if isinstance(record, Start)] == []


# -- who called whom, names and tags ----------------------------------------------------------------


def test_nested_calls_name_their_parents(db: Path) -> None:
    model = provenance.wrap(models.llama())

    @provenance.record(name="outer")
    def outer() -> None:
        inner()

    @provenance.record(name="inner")
    def inner() -> None:
        model.generate(models.tensor(), max_new_tokens=2)

    outer()
    models.runs(db)
    assert _parents(db) == {"outer": None, "inner": "outer", "generate": "inner"}


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async generator"])
def test_calls_inside_every_kind_of_function_name_their_parents(kind: str, db: Path) -> None:
    @provenance.record(name="inner")
    def inner() -> None:
        return None

    @provenance.record(name="outer")
    async def coroutine() -> None:
        await asyncio.sleep(0)
        inner()

    @provenance.record(name="outer")
    def generator() -> Iterator[int]:
        yield 1
        inner()

    @provenance.record(name="outer")
    async def both() -> AsyncIterator[int]:
        yield 1
        inner()

    async def read() -> None:
        async for _ in both():
            outside()

    @provenance.record(name="outside")
    def outside() -> None:
        return None

    if kind == "coroutine":
        asyncio.run(coroutine())
    elif kind == "generator":
        for _ in generator():
            outside()
    else:
        asyncio.run(read())
    models.runs(db)
    parents = _parents(db)
    assert parents.pop("outside", None) is None  # runs between two steps, not inside one
    assert parents == {"outer": None, "inner": "outer"}
    assert calls.ACTIVE.get() is None


def test_concurrent_tasks_keep_their_own_parents(db: Path) -> None:
    @provenance.record(name="inner")
    async def inner(number: int) -> int:
        await asyncio.sleep(0.001 * (number % 3))
        return number

    def task(number: int) -> Any:
        @provenance.record(name=f"outer {number}")
        async def outer() -> int:
            await asyncio.sleep(0.001 * (number % 2))
            return await inner(number)

        return outer()

    async def program() -> list[int]:
        return list(await asyncio.gather(*map(task, range(12))))

    assert asyncio.run(program()) == list(range(12))
    models.runs(db)
    with closing(sqlite3.connect(db)) as connection:
        rows = connection.execute(
            "select p.operation, p.run_id, r.run_id from runs r join runs p on r.parent_run = p.run_id"
        ).fetchall()
    assert sorted(operation for operation, _, _ in rows) == sorted(f"outer {number}" for number in range(12))


def test_run_blocks_nest_names_are_replaced_and_tags_add_up(db: Path) -> None:
    model = provenance.wrap(models.llama())
    one = functools.partial(model.generate, models.tensor(), max_new_tokens=2)
    with provenance.run(name="nightly", tags={"suite": 7}) as outer:
        one()
        with provenance.run(tags={"case": "a", "suite": 8}) as inner:
            one()
        with provenance.run(name="other"):
            one()
    one()
    runs = models.runs(db)
    assert [run.name for run in runs] == ["nightly", "nightly", "other", ""]
    assert [dict(run.tags) for run in runs] == [{"suite": "7"}, {"suite": "8", "case": "a"}, {"suite": "7"}, {}]
    assert inner.run_ids == [runs[1].run_id]
    assert outer.run_ids == [run.run_id for run in runs[:3]]
    assert (outer.run_id, inner.run_id) == (runs[2].run_id, runs[1].run_id)


def test_a_run_block_lets_exceptions_through_and_ends(db: Path) -> None:
    with pytest.raises(KeyError), provenance.run(name="broken"):
        raise KeyError("mine")
    provenance.record(lambda: None)()
    assert _only(db).name == ""


# -- threads ----------------------------------------------------------------------------------------


def test_in_threads_each_call_has_exactly_one_start_and_one_end(db: Path) -> None:
    shared = provenance.wrap(models.llama())
    expected = [
        models.llama().generate(models.tensor([5, 6, 7 + n]), max_new_tokens=3, eos_token_id=None) for n in range(8)
    ]
    wrong: list[int] = []

    def work(number: int) -> None:
        with provenance.run(tags={"thread": number}):
            for _ in range(20):
                ids = models.tensor([5, 6, 7 + number])
                result = shared.generate(ids, max_new_tokens=3, eos_token_id=None)
                if not torch.equal(result, expected[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    journal = models.journal(db)
    starts = [record for record in journal if isinstance(record, Start)]
    ends = [record.output.start_seq for record in journal if isinstance(record, End)]
    assert len(starts) == 160
    assert sorted(ends) == sorted(record.seq for record in starts)
    assert [record.seq for record in journal] == list(range(len(journal)))
    runs = models.runs(db)
    assert {run.status for run in runs} == {"ok"}
    assert sorted(int(str(run.fields["context.call_index"].value)) for run in runs) == list(range(1, 161))
    for run in runs:
        number = int(run.tags["thread"])
        assert run.sequences[0].input_ids == (5, 6, 7 + number)
        assert run.sequences[0].output_ids == tuple(expected[number][0, 3:].tolist())
        assert len(run.sequences[0].steps) == 3


def test_what_wrap_keeps_of_models_ends_with_them() -> None:
    model = provenance.wrap(models.llama())
    count = len(wrapping._wrapped)
    del model
    gc.collect()
    assert len(wrapping._wrapped) == count - 1


def test_a_model_that_torch_compile_holds_is_recorded_as_itself_and_its_output_kept(db: Path) -> None:
    """`generate` of such a model runs the model inside, uncompiled: that is what the record says, bit for bit."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    held = models.llama()
    model = torch.compile(held, backend=backend)
    settings = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    bare = model.generate(models.tensor(), **settings)
    assert provenance.wrap(provenance.wrap(model)) is model
    seen = model.generate(models.tensor(), **settings)
    assert torch.equal(bare.sequences, seen.sequences)
    assert all(map(torch.equal, bare.logits, seen.logits))
    run = models.last(db)
    assert run.fields["model.class"].value == f"{type(held).__module__}.{type(held).__qualname__}"
    assert run.fields["torch.compile.active"].value is bool(graphs)
    provenance.uninstrument(model)
    assert "generate" not in vars(held)
