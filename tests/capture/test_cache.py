"""The first result, served again: equal in type and content, once asked, never after anything has changed."""

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import provenance
from provenance import recorder as recorders
from provenance.capture import cache
from provenance.capture.models import MODELS
from provenance.errors import BadSetting, UsageError
from provenance.integrity import whole
from provenance.store import results
from tests.conftest import Command
from tests.fakes import models

cached: Any = provenance.cached
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
GREEDY = {"max_new_tokens": 6, "do_sample": False}
pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
STEP = 2  # read by a function below
OPAQUE: Any = threading.Lock()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    yield
    for shelf in cache._shared.shelves.values():
        shelf.forget()
    cache._shared = cache._Shared()


class Calls:
    """Counts calls, and is nothing that a function's key could see: else it would be another function at each call."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, item: Any = None) -> int:
        """Count one."""
        self.seen.append(item)
        return len(self.seen)


class Counted:
    """Counts the forward passes of a model's class; the model itself stays as it is."""

    def __init__(self, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes = 0
        plain = kind.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return plain(*args, **kwargs)

        monkeypatch.setattr(kind, "forward", forward)

    def ran(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """Say whether a call ran the model."""
        before = self.passes
        model.generate(*args, **kwargs)
        return self.passes > before


@pytest.fixture
def model() -> Any:
    return cached(models.llama(), tokenizer=models.letters(chat=True))


@pytest.fixture
def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted(type(model), monkeypatch)
    assert found.ran(model, IDS, **GREEDY)
    assert not found.ran(model, IDS, **GREEDY)
    return found


# -- what is served -----------------------------------------------------------------------------------


def test_what_is_served_is_equal_and_nobody_elses(model: Any, counted: Counted, db: Path) -> None:
    first = model.generate(IDS, **GREEDY)
    again = model.generate(IDS, **GREEDY)
    assert type(again) is type(first) is torch.Tensor
    assert again.dtype == first.dtype
    assert torch.equal(first, again)
    kept = again.clone()
    again += 1
    first -= 1
    assert torch.equal(model.generate(IDS, **GREEDY), kept)
    assert counted.passes == 6


def test_each_time_is_a_run_of_its_own_that_names_its_original_and_counts_for_nothing(model: Any, db: Path) -> None:
    with provenance.run() as block:
        for _ in range(3):
            model.generate(IDS, **GREEDY)
    assert len(block.run_ids) == 3
    found = {run.run_id: run for run in models.runs(db)}
    first, *served = [found[name] for name in block.run_ids]
    assert [run.kind for run in (first, *served)] == ["call", "cached", "cached"]
    for run in served:
        assert run.fields["context.cached_from"].value == first.run_id
        assert [s.output_ids for s in run.sequences] == [s.output_ids for s in first.sequences]
        assert [(s.input_key, s.output_key) for s in run.sequences] == [
            (s.input_key, s.output_key) for s in first.sequences
        ]
    from provenance.settings import load, places
    from tests.fakes.records import rows

    spots = places(load())
    assert rows(spots, "select max(runs) from equal_inputs") == [(1,)]
    assert rows(spots, "select count(*) from pair_hours") == [(0,)]


def test_named_outputs_come_back_as_what_they_were(model: Any) -> None:
    asked = {**GREEDY, "return_dict_in_generate": True, "output_scores": True, "use_cache": False}
    first, again = (model.generate(IDS, **asked) for _ in range(2))
    assert type(again) is type(first)
    assert list(again) == list(first)
    assert torch.equal(first.sequences, again.sequences)
    assert isinstance(again.scores, tuple)
    assert all(torch.equal(a, b) for a, b in zip(first.scores, again.scores, strict=True))


# -- what never is ------------------------------------------------------------------------------------


def _weight(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _default(model: Any) -> None:
    model.generation_config.repetition_penalty = 1.5


def _template(model: Any) -> None:
    MODELS.watched(model).tokenizer.chat_template = "{{ messages }}"


def _threads(_: Any) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@pytest.mark.parametrize("change", [_weight, _default, _template, _threads])
def test_after_a_change_of_weights_template_default_or_switch_it_is_asked_again(
    model: Any, counted: Counted, change: Any
) -> None:
    threads = torch.get_num_threads()
    try:
        change(model)
        assert counted.ran(model, IDS, **GREEDY)
        assert not counted.ran(model, IDS, **GREEDY)
    finally:
        torch.set_num_threads(threads)


def test_a_weight_put_back_is_known_again(model: Any, counted: Counted) -> None:
    with torch.no_grad():
        kept = model.lm_head.weight.clone()
        model.lm_head.weight[0, 0] += 1
        assert counted.ran(model, IDS, **GREEDY)
        model.lm_head.weight.copy_(kept)
    assert not counted.ran(model, IDS, **GREEDY)


@pytest.mark.parametrize(
    "asked",
    [
        {"max_new_tokens": 7}, {"repetition_penalty": 1.3}, {"num_beams": 2}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 2)},
        {"generation_config": GenerationConfig(max_new_tokens=6, eos_token_id=3)}, {"suppress_tokens": [5]},
    ],
)  # fmt: skip
def test_another_setting_is_another_question(model: Any, counted: Counted, asked: dict[str, Any]) -> None:
    assert counted.ran(model, IDS, **{**GREEDY, **asked})
    assert not counted.ran(model, IDS, **{**GREEDY, **asked})
    assert not counted.ran(model, IDS, **GREEDY)


def test_another_input_another_model_and_another_seed_of_weights_are_other_questions(
    model: Any, counted: Counted
) -> None:
    assert counted.ran(model, IDS[:, 1:], **GREEDY)
    assert counted.ran(model, IDS.to(torch.int32), **GREEDY)
    other = cached(models.llama(23), tokenizer=models.letters(chat=True))
    assert counted.ran(other, IDS, **GREEDY)
    twin = cached(models.llama(), tokenizer=models.letters(chat=True))
    assert not counted.ran(twin, IDS, **GREEDY)


class Doubled(LogitsProcessor):  # type: ignore[misc]
    """Code of the caller's own."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Double."""
        return 2 * scores


@pytest.mark.parametrize(
    "asked",
    [{"do_sample": True}, {"max_time": 100.0}, {"logits_processor": LogitsProcessorList([Doubled()])},
     {"return_dict_in_generate": True}],
)  # fmt: skip
def test_what_cannot_be_known_to_be_equal_is_always_asked(model: Any, counted: Counted, asked: dict[str, Any]) -> None:
    assert all(counted.ran(model, IDS, **{**GREEDY, **asked}) for _ in range(2))
    assert recorders.current().errors == 0  # type: ignore[union-attr]


def test_a_draw_from_a_seed_is_served_and_leaves_the_generators_as_the_draw_did(model: Any, counted: Counted) -> None:
    asked = {"max_new_tokens": 6, "do_sample": True}
    drawn = []
    for _ in range(2):
        with provenance.seeded(7):
            drawn.append((model.generate(IDS, **asked), torch.rand(3), random.random()))
    assert counted.passes == 12
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert drawn[0][2] == drawn[1][2]
    with provenance.seeded(8):
        assert counted.ran(model, IDS, **asked)


# -- functions ----------------------------------------------------------------------------------------


def test_a_function_is_asked_once_for_equal_arguments_however_they_are_given() -> None:
    calls = Calls()

    @provenance.cached(policy={"version": "1"})
    def ask(prompt: str, *, n: int = 2) -> tuple[str, list[float]]:
        calls(prompt)
        return prompt * n, [float("nan"), -0.0]

    first, second = ask("a"), ask(prompt="a", n=2)
    assert whole.encode(first) == whole.encode(second)
    assert first[1] is not second[1]
    assert ask("b")[0] == "bb"
    assert calls.seen == ["a", "b"]
    assert ask.__name__ == "ask"


def counter() -> int:
    """Return a number that tells each call apart."""
    return time.perf_counter_ns()


def stepped(n: int) -> tuple[int, int]:
    """Read a global and call another function."""
    return n * STEP, counter()


def test_a_changed_global_default_closure_or_helper_is_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]
    ask = cached(stepped)
    first = ask(1)
    assert ask(1) == first
    monkeypatch.setattr(here, "STEP", 3)
    assert (second := ask(1)) != first
    assert ask(1) == second
    monkeypatch.setattr(here, "STEP", 2)
    assert ask(1) == first
    monkeypatch.setattr(here, "counter", lambda: 5)
    assert ask(1) == (2, 5)
    monkeypatch.setattr(stepped, "__defaults__", (4,))
    assert ask() == (8, 5)

    def made(by: int) -> Any:
        return cached(lambda n: (n * by, time.perf_counter_ns()))

    assert made(2)(1) == made(2)(1)
    assert made(2)(1) != made(3)(1)


def test_a_function_around_a_model_is_asked_again_when_a_weight_changes() -> None:
    inner = models.llama()

    @provenance.cached
    def ask(ids: list[int]) -> Any:
        return inner.generate(torch.tensor([ids]), **GREEDY), time.perf_counter_ns()

    first = ask([5, 6, 7])
    assert ask([5, 6, 7])[1] == first[1]
    _weight(inner)
    assert ask([5, 6, 7])[1] != first[1]


def test_what_cannot_be_seen_is_not_served_unless_vouched_for(caplog: pytest.LogCaptureFixture) -> None:
    def ask(n: int) -> int:
        assert OPAQUE
        return time.perf_counter_ns() + n

    strict, vouched, other = (cached(ask, policy=p) for p in (None, {"version": "1"}, {"version": "2"}))
    with caplog.at_level(logging.WARNING, "provenance"):
        assert len({strict(1) for _ in range(3)}) == 3
    said = [item.getMessage() for item in caplog.records]
    assert len(said) == 1
    assert "it depends on OPAQUE, a _thread.lock, of which it cannot be seen whether it changes" in said[0]
    assert vouched(1) == vouched(1)
    assert other(1) != vouched(1)


@pytest.mark.parametrize("result", [object(), threading.Lock(), torch.nn.Linear(1, 1), "key hf_" + "a" * 20])
def test_a_result_that_would_not_come_back_or_is_secret_is_never_kept(
    result: Any, caplog: pytest.LogCaptureFixture, db: Path
) -> None:
    calls = Calls()

    @provenance.cached(policy={"version": "1"})
    def ask() -> Any:
        calls()
        return result

    with caplog.at_level(logging.WARNING, "provenance"):
        assert all(ask() is result for _ in range(2))
    assert len(calls.seen) == 2
    assert len(caplog.records) == 1
    assert b"hf_aaaa" not in b"".join(item.read_bytes() for item in db.parent.rglob("*") if item.is_file())


def test_a_function_that_draws_is_not_kept() -> None:
    ask = cached(lambda: random.random())
    assert ask() != ask()
    with provenance.seeded(1):
        first, then = ask(), random.random()
    with provenance.seeded(1):
        assert (ask(), random.random()) == (first, then)


# -- at once ------------------------------------------------------------------------------------------


def at_once(count: int, ask: Any) -> list[Any]:
    """Call something from many threads that start together."""
    found: list[Any] = [None] * count
    barrier = threading.Barrier(count)

    def work(place: int) -> None:
        barrier.wait()
        found[place] = ask()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_64_threads_that_ask_the_same_make_one_call(model: Any, monkeypatch: pytest.MonkeyPatch, db: Path) -> None:
    counted = Counted(type(model), monkeypatch)
    found = at_once(64, lambda: model.generate(IDS, **GREEDY))
    assert counted.passes == 6
    assert all(torch.equal(item, found[0]) for item in found)
    assert len({item.data_ptr() for item in found}) == 64
    kinds = [run.kind for run in models.runs(db)]
    assert sorted(kinds) == ["cached"] * 63 + ["call"]
    assert recorders.current().errors == 0  # type: ignore[union-attr]


def test_where_the_call_fails_each_of_them_fails_of_its_own_and_the_next_may_succeed() -> None:
    calls = Calls()

    @provenance.cached(policy={"version": "1"})
    def ask() -> int:
        number = calls()
        if number < 4:
            time.sleep(0.05)
            raise OSError("away")
        return number

    def tried() -> Any:
        try:
            return ask()
        except OSError as error:
            return str(error)

    found = at_once(8, tried)
    assert found.count("away") == 3
    assert found.count(4) == 5
    assert len(calls.seen) == 4


def test_a_function_that_asks_itself_does_not_wait_for_itself() -> None:
    calls = Calls()

    @provenance.cached(policy={"version": "1"})
    def ask() -> int:
        return ask() + 1 if calls() < 3 else 0

    assert ask() == 2
    assert ask() == 2
    assert len(calls.seen) == 3


def test_tasks_that_ask_the_same_make_one_call() -> None:
    calls = Calls()

    @provenance.cached(policy={"version": "1"})
    async def ask(n: int) -> list[int]:
        calls(n)
        await asyncio.sleep(0.02)
        return [n]

    async def many() -> list[list[int]]:
        return list(await asyncio.gather(*(ask(n % 2) for n in range(40))))

    found = asyncio.run(many())
    assert found == [[n % 2] for n in range(40)]
    assert sorted(calls.seen) == [0, 1]
    assert len({id(item) for item in found}) == 40

    @provenance.cached
    async def fails() -> None:
        raise OSError("away")

    with pytest.raises(OSError, match="away"):
        asyncio.run(fails())


# -- across processes ---------------------------------------------------------------------------------

LIVES = """
import os, sys, provenance
provenance.init(writer="off")
@provenance.cached
def ask(n):
    return (n, os.getpid())
for n in range(int(sys.argv[1]), int(sys.argv[2])):
    print(*ask(n), flush=True)
"""


def test_two_processes_share_the_first_result(python: Command) -> None:
    first, second = (python(LIVES, "0", "5") for _ in range(2))
    assert first.stdout == second.stdout != "", first.stderr + second.stderr


@pytest.mark.parametrize("after", [0, 1, 7, 23])
def test_a_killed_process_loses_no_result_that_it_returned(python: Command, after: int) -> None:
    life = subprocess.Popen([sys.executable, "-c", LIVES, "0", "1000000"], stdout=subprocess.PIPE, text=True)
    assert life.stdout is not None
    seen = [life.stdout.readline() for _ in range(after + 1)]
    os.kill(life.pid, signal.SIGKILL)
    seen += life.stdout.readlines()
    life.wait()
    life.stdout.close()
    seen = [line for line in seen if line.endswith("\n")]
    assert len(seen) > after
    assert python(LIVES, "0", str(len(seen))).stdout == "".join(seen)


def test_who_is_second_to_store_returns_what_was_stored_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process stores its result while ours is still asking."""
    ask = cached(lambda: time.perf_counter_ns())
    plain = results.Shelf.put
    theirs = results.First(whole.encode((41, None)), "0" * 36, time.time_ns())

    def put(shelf: Any, key: bytes, first: Any, *rest: Any) -> Any:
        plain(shelf, key, theirs, *rest)
        return plain(shelf, key, first, *rest)

    monkeypatch.setattr(results.Shelf, "put", put)
    assert ask() == 41


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_serves_and_stores_too() -> None:
    ask = cached(lambda n: (n, os.getpid()))
    first = ask(1)
    inward, outward = os.pipe()
    child = os.fork()
    if not child:
        os.write(outward, repr([ask(1), ask(2), ask(2)]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = os.read(inward, 1000).decode()
    os.close(inward)
    os.close(outward)
    assert found == repr([first, (2, child), (2, child)])
    assert ask(2) == (2, child)


# -- limits and failures ------------------------------------------------------------------------------


def test_a_result_that_is_too_old_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = cached(lambda: time.perf_counter_ns(), policy={"age": 3600})
    first = ask()
    assert ask() == first
    plain = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: plain() + 3601 * 10**9)
    assert (second := ask()) != first
    assert ask() == second


def test_the_oldest_go_when_all_take_too_much_and_what_is_too_large_is_not_kept() -> None:
    ask = cached(lambda n: (n, time.perf_counter_ns(), os.urandom(1000)), policy={"size": 5000, "entry": 2000})
    first = [ask(n) for n in range(8)]
    assert [ask(n) == first[n] for n in (7, 6, 5)] == [True] * 3
    assert ask(0) != first[0]
    large = cached(lambda: (time.perf_counter_ns(), bytes(3000)), policy={"entry": 2000})
    assert large() != large()


@pytest.mark.parametrize("broken", ["get", "put"])
def test_where_the_cache_fails_the_call_is_made(model: Any, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the disk is gone")

    plain = models.llama().generate(IDS, **GREEDY)
    monkeypatch.setattr(results.Shelf, broken, fail)
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert recorders.current().errors >= 2  # type: ignore[union-attr]
    assert cached(lambda: 5)() == 5


def test_a_damaged_result_is_asked_again(db: Path) -> None:
    import sqlite3

    ask = cached(lambda: (time.perf_counter_ns(), "x" * 500))
    first = ask()
    with sqlite3.connect(db) as base:
        assert base.execute("update cached_results set data = x'00'").rowcount == 1
    base.close()
    assert ask() != first


@pytest.mark.parametrize("capture", ["digest", "off"])
def test_where_outputs_are_not_kept_it_refuses(capture: str) -> None:
    early = cached(lambda: time.perf_counter_ns())
    provenance.init(capture=capture)
    with pytest.raises(BadSetting, match=f"capture={capture} keeps none; use capture=full"):
        cached(lambda: 1)
    with pytest.raises(BadSetting, match="use capture=full"):
        cached(models.llama())
    assert early() != early()


def test_where_weights_are_not_read_a_model_is_refused() -> None:
    provenance.init(weights="files")
    with pytest.raises(BadSetting, match="weights=files reads none; use weights=tensors"):
        cached(models.llama())


def test_what_is_no_model_and_no_function_is_refused() -> None:
    def yields() -> Iterator[int]:
        yield 1

    for item in (object(), dict, torch.nn.Linear(1, 1), "text"):
        with pytest.raises(UsageError, match="cached\\(\\) takes a transformers model that generates, or a function"):
            cached(item)
    with pytest.raises(UsageError, match="yields, and only what is returned whole"):
        cached(yields)


@pytest.mark.parametrize(
    "policy", [{"moon": 1}, 7, {"age": 0}, {"size": "big"}, {"environment": "same"}, {"version": 1}, {"entry": True}]
)
def test_a_policy_that_is_none_is_one_sentence(policy: Any) -> None:
    with pytest.raises(BadSetting, match="policy") as found:
        cached(lambda: 1, policy=policy)
    assert "\n" not in str(found.value)


def test_taking_the_observer_off_takes_the_cache_off() -> None:
    model = models.llama()
    assert cached(model) is model
    cached(model, policy={"age": 1})
    assert getattr(model.generate, "provenance_cached", None) is not None
    assert not hasattr(model.generate.__func__.provenance_cached, "provenance_cached")  # one cache, not two
    provenance.uninstrument(model)
    assert "generate" not in vars(model)


def test_with_recording_off_it_is_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_DISABLED", "1")
    ask = cached(lambda: time.perf_counter_ns())
    assert ask() != ask()
    with pytest.raises(TypeError):
        ask(1)


@pytest.mark.parametrize("environment", ["exact", "any"])
def test_the_environment_counts_as_the_policy_says(environment: str) -> None:
    ask = cached(lambda: time.perf_counter_ns(), policy={"environment": environment})
    ask()
    first, threads = ask(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert (ask() == first) == (environment == "any")
    finally:
        torch.set_num_threads(threads)
