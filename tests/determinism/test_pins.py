"""Pins, and the proof of what the toolkit claims: on the nearly tied model no prompt differs with it, many do without."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import provenance
from provenance.cli import models as bundled
from provenance.determinism import batches, pins
from provenance.determinism.batches import Shapes
from provenance.determinism.pins import ATTENTION, CACHE, THREADS, pinned
from provenance.determinism.report import ABSENT, ALREADY, SET
from provenance.errors import BadSetting
from tests.fakes import models


def state(model: Any) -> tuple[Any, ...]:
    return model.config._attn_implementation, model.generation_config.use_cache, torch.get_num_threads()


def test_a_pin_holds_what_is_named_tells_it_and_puts_it_back() -> None:
    model = models.llama()
    before = state(model)
    with pinned(model, attention="eager", cache=False, threads=1) as held:
        assert state(model) == ("eager", False, 1)
        assert {row.name: row.outcome for row in held.report} == {ATTENTION: SET, CACHE: SET, THREADS: SET}
        with pinned(model, attention="eager", cache=False, threads=1) as inner:
            assert [row.outcome for row in inner.report] == [ALREADY] * 3
        assert state(model) == ("eager", False, 1)
    assert state(model) == before
    with pytest.raises(KeyError), pinned(model, attention="eager", threads=1):
        raise KeyError
    assert state(model) == before
    with pinned(model) as nothing:
        assert list(nothing.report) == []


def test_what_a_model_does_not_take_is_told_and_leaves_it_as_it_was() -> None:
    model = models.llama()
    before = state(model)
    with pinned(model, attention="no_such_kernel") as held:
        assert held.report[ATTENTION].outcome == ABSENT
        assert held.report[ATTENTION].reason
        assert state(model) == before
    assert state(model) == before
    bare = torch.nn.Linear(2, 2)
    with pinned(bare, attention="eager", cache=True) as held:
        assert [row.outcome for row in held.report] == [ABSENT, ABSENT]
    with pytest.raises(BadSetting, match="threads is -1"):
        pinned(model, threads=-1)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "close", "raise"]), st.integers(0, 7), st.sampled_from(["", "eager", "sdpa", "bad"])
    ),
    max_size=20,
)


@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_blocks_that_overlap_in_any_order_bring_everything_back(script: list[tuple[str, int, str]]) -> None:
    model = models.llama()
    before = state(model)
    open_: list[pinned] = []
    for what, number, attention in script:
        block = pinned(model, attention=attention, cache=(None, True, False)[number % 3], threads=number % 3)
        if what == "open":
            block.__enter__()
            open_.append(block)
        elif what == "close" and open_:
            open_.pop(number % len(open_)).__exit__(None, None, None)
        elif what == "raise":
            inside = state(model)
            with pytest.raises(KeyError), block:
                raise KeyError
            assert state(model) == inside
    for block in open_:
        block.__exit__(None, None, None)
    assert state(model) == before


def test_blocks_of_threads_that_end_in_any_order_leave_the_model_as_before() -> None:
    model = models.llama()
    before = state(model)
    opened, closed = threading.Barrier(4), [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        with pinned(model, attention="eager", cache=bool(number % 2), threads=number + 1):
            opened.wait(30)
            closed[number].wait(30)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for worker in workers:
        worker.start()
    opened.wait(30)
    for number in (1, 0, 2):
        closed[number].set()
        workers[number].join(30)
    assert state(model) == before
    assert not len(pins._models[model])


# -- the proof --------------------------------------------------------------------------------------

TOKENS, ROWS, LENGTH = 16, 4, 32
Ask = Callable[[list[int], list[list[int]]], list[int]]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(1, 512) for _ in range(rng.randint(4, LENGTH))] for _ in range(count)]


class Dials:
    """What differs between two runs of one program and is no part of the call: each dial has two positions."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @contextmanager
    def threads(self, on: bool) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1 if on else 2)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def cache(self, on: bool) -> Iterator[None]:
        self.model.generation_config.use_cache = not on
        try:
            yield
        finally:
            self.model.generation_config.use_cache = True

    @contextmanager
    def attention(self, on: bool) -> Iterator[None]:
        """As where a checkpoint was loaded with another implementation, and a program allowed other kernels."""
        self.model.set_attn_implementation("eager" if on else "sdpa")
        try:
            yield
        finally:
            self.model.set_attn_implementation("sdpa")

    @contextmanager
    def kernel(self, on: bool) -> Iterator[None]:
        torch.backends.cuda.enable_flash_sdp(not on)
        try:
            yield
        finally:
            torch.backends.cuda.enable_flash_sdp(True)


def plain(model: Any, company: bool) -> Ask:
    """Ask as programs do: alone without padding, or in a batch padded to its longest prompt."""

    def ask(prompt: list[int], others: list[list[int]]) -> list[int]:
        rows = [*others, prompt] if company else [prompt]
        shape = Shapes(len(rows), (max(map(len, rows)),), 0, spare=0)
        return batches.generate(model, rows, shape, max_new_tokens=TOKENS)[-1]

    return ask


def steady(model: Any, company: bool) -> Ask:
    """Ask with the toolkit on: switches and attention held, pins, one shape for every call.

    One thread: over two, a row can be summed otherwise at another place of its batch, and `probe` says so.
    """

    def ask(prompt: list[int], others: list[list[int]]) -> list[int]:
        rows = [*others, prompt] if company else [prompt]
        with (
            provenance.deterministic(attention="math"),
            pinned(model, attention="sdpa", cache=True, threads=1),
        ):
            return batches.generate(model, rows, Shapes(ROWS, (LENGTH + 8,), 0), max_new_tokens=TOKENS)[-1]

    return ask


CLAIMED = ("batch", "cache", "attention", "kernel", "threads", "all")


def differing(way: Callable[[Any, bool], Ask], dial: str, count: int) -> int:
    """Count the prompts that are answered otherwise after one dial, or all of them, was turned."""
    model = bundled.twin_rows()
    dials = Dials(model)
    asked = prompts(count)
    turned = 0
    for n, prompt in enumerate(asked):
        others = [asked[(n + k) % count] for k in range(1, ROWS)]
        answers = []
        for on in (False, True):
            with ExitStack() as stack:
                for name in ("cache", "attention", "kernel", "threads"):
                    stack.enter_context(getattr(dials, name)(on and dial in (name, "all")))
                answers.append(way(model, on and dial in ("batch", "all"))(prompt, others))
        turned += answers[0] != answers[1]
    return turned


@pytest.mark.parametrize("dial", CLAIMED)
def test_with_the_toolkit_no_prompt_differs_and_without_it_some_do(dial: str) -> None:
    assert differing(steady, dial, 5) == 0
    assert differing(plain, dial, 5) > 0


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("dial", CLAIMED)
def test_none_of_two_hundred_prompts_differs_with_the_toolkit(dial: str) -> None:
    without, within = differing(plain, dial, 200), differing(steady, dial, 200)
    print(f"{dial}: {without} of 200 prompts differ without the toolkit, {within} with it")
    assert within == 0
    assert without > 0
