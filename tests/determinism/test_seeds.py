# ruff: noqa: NPY002 - the global generator is the one that programs draw from
"""Seeds: everything that is loaded starts from one, a block leaves no trace, and a call's seed depends on its name alone."""

import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import provenance
from provenance.determinism import seeds
from provenance.determinism.report import ABSENT, ALREADY, LATE, SET, Kept
from provenance.errors import BadSetting
from tests.fakes import models


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def state() -> tuple[Any, ...]:
    """Everything that `seeded` has to bring back, in a form that compares."""
    found = seeds.states()
    numpy = found["numpy"]["state"]
    waiting = {name: repr(value) for name, value in found.items() if name.endswith("waiting")}
    return found["python"], numpy["key"].tobytes(), numpy["pos"], found["cpu"].numpy().tobytes(), waiting


def test_one_seed_starts_every_generator_as_its_own_seed_function_does() -> None:
    with provenance.seeded(1):  # puts the states of the test run back
        report = provenance.seed_all(42)
        ours = draw()
        random.seed(42)
        np.random.seed(42)
        torch.manual_seed(42)
        assert ours == draw()
        assert {row.name for row in report.of(SET)} == {"rng.python", "rng.numpy", "rng.torch_cpu"}
        assert report["rng.torch_cuda"].outcome == ABSENT
        assert torch.initial_seed() == 42


def test_a_seed_beyond_32_bits_is_folded_for_numpy_and_the_report_says_so() -> None:
    with provenance.seeded(1):
        report = provenance.seed_all(2**40 + 5)
        assert (report["rng.numpy"].value, report["rng.torch_cpu"].value) == (5, 2**40 + 5)
        assert "32 bits" in report["rng.numpy"].reason


@pytest.mark.parametrize("seed", [-1, 2**63, True, 1.0, "7", None])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed: Any) -> None:
    before = state()
    for act in (provenance.seed_all, provenance.seeded):
        with pytest.raises(BadSetting, match=r"it must be an integer"):
            act(seed)
    assert state() == before


def test_hashes_of_strings_are_told_as_they_were_at_the_start() -> None:
    code = (
        "import os, provenance\n{0}\nrow = provenance.seed_all(1)['env.PYTHONHASHSEED']\nprint(row.outcome, row.value)"
    )
    late = "os.environ['PYTHONHASHSEED'] = '5'"
    for environ, line, expected in (
        ({"PYTHONHASHSEED": "5"}, "", f"{ALREADY} 5"),
        ({"PYTHONHASHSEED": "0"}, "", f"{ALREADY} 0"),
        ({}, "", f"{LATE} None"),
        ({}, late, f"{LATE} None"),  # a variable that was set too late fixes nothing
    ):
        made = subprocess.run(
            [sys.executable, "-c", code.format(line)], capture_output=True, text=True, check=True,
            env={"PATH": "/usr/bin", "PYTHONPATH": sys.path[0], **environ}, cwd=provenance.__path__[0] + "/..",
        )  # fmt: skip
        assert made.stdout.strip() == expected


def test_seeding_imports_nothing() -> None:
    code = (
        "import sys, provenance\n"
        "with provenance.seeded(3): pass\n"
        "report = provenance.seed_all(3)\n"
        "assert report['rng.torch_cpu'].outcome == 'not available here'\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=provenance.__path__[0] + "/..", check=False).returncode == 0


def test_a_block_draws_from_its_seed_and_leaves_no_trace() -> None:
    before = state()
    with provenance.seeded(7):
        first = draw()
        with provenance.seeded(8):
            assert draw() != first
        second = draw()  # goes on where the inner block began
    with provenance.seeded(7):
        assert (draw(), draw()) == (first, second)
    assert state() == before


def test_an_exception_brings_the_states_back_too() -> None:
    before = state()
    with pytest.raises(KeyError), provenance.seeded(7):
        raise KeyError(draw())
    assert state() == before


def test_as_a_decorator_every_call_starts_anew() -> None:
    @provenance.seeded(7)
    def twice(scale: int) -> float:
        return scale * draw()[0]

    assert twice(2) == twice(scale=2)


def test_blocks_of_threads_take_turns_and_each_draws_as_alone() -> None:
    before = state()
    alone = []
    for seed in range(6):
        with provenance.seeded(seed):
            alone.append([draw() for _ in range(40)])
    found: list[Any] = [None] * 6
    ready = threading.Barrier(6)

    def work(seed: int) -> None:
        ready.wait(30)
        with provenance.seeded(seed):
            found[seed] = [draw() for _ in range(40)]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == alone
    assert state() == before


def test_a_sampled_generate_does_not_depend_on_what_ran_before() -> None:
    model = models.llama()

    def ask() -> list[list[int]]:
        with provenance.seeded.call(42, "prompt", 3):
            out = model.generate(models.tensor(), do_sample=True, max_new_tokens=12, eos_token_id=None)
        rows: list[list[int]] = out.tolist()
        return rows

    alone = ask()
    with provenance.seeded(1):
        torch.rand(1000)
        model.generate(models.tensor(), do_sample=True, max_new_tokens=5)
        assert ask() == alone
    with provenance.seeded.call(42, "prompt", 4):
        other = model.generate(models.tensor(), do_sample=True, max_new_tokens=12, eos_token_id=None).tolist()
    assert other != alone


def test_the_seed_of_a_call_is_a_contract() -> None:
    """No commit may alter these."""
    assert [provenance.seeded.derive(42, index) for index in range(3)] == [862082301, 1348685507, 2085017434]
    assert provenance.seeded.derive(0) == 2063578084
    assert provenance.seeded.derive(42, "\ud800") > 0


@given(st.integers(0, 2**63 - 1), st.lists(st.one_of(st.text(), st.integers())))
def test_every_engine_takes_the_seed_of_a_call(seed: int, parts: list[str | int]) -> None:
    assert 1 <= provenance.seeded.derive(seed, *parts) < 2**31


def test_seeds_that_wait_for_a_device_wait_again_afterwards() -> None:
    """torch keeps the last seed for CUDA until CUDA is in use; a block may not leave its own there."""
    tracker = torch.cuda._lazy_seed_tracker
    torch.cuda.manual_seed_all(5)
    before = dict(vars(tracker))
    with provenance.seeded(6):
        assert vars(tracker) != before
    assert vars(tracker) == before


def test_a_device_that_came_into_use_inside_gets_the_seed_that_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    found: dict[str, Any] = {"call_order": [None, (lambda: called.append("waited"), [])]}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "seed_all", lambda: called.append("anew"))
    seeds._unwait(torch, "cuda", found)
    seeds._unwait(torch, "cuda", {"call_order": []})
    assert called == ["waited", "anew"]


def test_one_state_that_fails_does_not_keep_the_others() -> None:
    with provenance.seeded(1):
        kept = seeds.states()
        first = draw()
        with pytest.raises((TypeError, ValueError)):
            seeds.restore({**kept, "python": "no state"})
        assert (float(np.random.rand()), float(torch.rand(()))) == first[1:]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "close", "draw"]), st.integers(0, 7)), max_size=25))
def test_blocks_that_overlap_in_any_order_bring_everything_back(script: list[tuple[str, int]]) -> None:
    """As the tasks of an event loop do, in one thread."""
    before = state()
    blocks: list[Any] = []
    for what, number in script:
        if what == "open":
            block = provenance.seeded(number)
            block.__enter__()
            blocks.append(block)
        elif what == "close" and blocks:
            blocks.pop(number % len(blocks)).__exit__(None, None, None)
        else:
            draw()
        if not blocks:
            before = state()  # what is drawn outside of every block is the program's own
    while blocks:
        blocks.pop(0).__exit__(None, None, None)
    assert state() == before


def test_the_last_to_close_gets_what_stood_before_the_first() -> None:
    kept = Kept()
    one, two, three = kept.push(1), kept.push(2), kept.push(3)
    assert kept.pop(two) is None  # three stands on it
    assert (kept.pop(three), kept.pop(one), len(kept)) == (2, 1, 0)
