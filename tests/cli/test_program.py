"""run: an unchanged program is recorded, and behaves as it does without us."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.conftest import Command

PROGRAM = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(config).eval()
out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
print(out.tolist())
sys.exit(7)
"""


def test_an_unchanged_program_is_recorded_and_keeps_its_exit_code(command: Command, tmp_path: Path) -> None:
    program = tmp_path / "app.py"
    program.write_text(PROGRAM)
    plain = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    found = command("run", "--name", "job", "--tag", "a=1", "--tag", "b=x=y", "--", sys.executable, str(program))
    assert (found.returncode, plain.returncode) == (7, 7)
    assert found.stdout == plain.stdout
    run = json.loads(command("show", "tag:job", "--json").stdout)
    assert run["tags"] == {"a": "1", "b": "x=y"}
    assert run["runtime"] == "transformers"
    assert run["sequences"][0]["input_ids"] == [1, 2, 3]
    assert run["sequences"][0]["output_ids"] == json.loads(plain.stdout)[0][3:]
    assert run["fields"]["app.program"]["value"].endswith("app.py")


def test_a_program_that_is_no_python_runs_as_ever(command: Command) -> None:
    assert command("run", "--", "sh", "-c", "exit 3").returncode == 3
    assert command("run", "true").returncode == 0


def test_the_end_by_a_signal_is_told_as_shells_tell_it(command: Command) -> None:
    assert command("run", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


def test_signals_are_handed_on(tmp_path: Path) -> None:
    program = tmp_path / "wait.py"
    program.write_text(
        textwrap.dedent("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        print("ready", flush=True)
        time.sleep(30)
    """)
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "provenance", "run", "--", sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(10) == 42
    child.stdout.close()


def test_a_sitecustomize_of_the_users_own_still_runs(command: Command, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    found = command("run", "--", sys.executable, "-c", "print('app')", env=environ)
    # once in the command itself, which is a Python program too, and once in the program it runs
    assert found.stdout == "mine\nmine\napp\n"


def test_mistakes_are_one_sentence(command: Command) -> None:
    assert "run takes a command" in command("run").stderr
    assert "there is no program 'no-such-program'" in command("run", "--", "no-such-program").stderr
    assert "is not KEY=VALUE" in command("run", "--tag", "x", "--", "true").stderr
    assert "cannot be started" in command("run", "--", "/").stderr
    assert command("run").returncode == 2


STEADY = """
import random, sys
first = random.random()
import numpy, torch
print(hash("a"), first, numpy.random.rand(), torch.rand(()).item(), torch.are_deterministic_algorithms_enabled(),
      torch.backends.cudnn.allow_tf32, torch.initial_seed(), flush=True)
"""


def test_a_program_can_be_held_steady_from_its_first_line_on(command: Command) -> None:
    """Its hashes, the draws before and after its imports, and the switches of torch, which it loads itself."""
    wanted = ("run", "--deterministic", "--seed", "42", "--", sys.executable, "-c", STEADY)
    one, other = command(*wanted), command(*wanted)
    assert one.returncode == 0, one.stderr
    assert one.stdout == other.stdout
    words = one.stdout.split()
    assert words[4:] == ["True", "False", "42"]
    import random

    assert float(words[1]) == random.Random(42).random()
    plain = command("run", "--", sys.executable, "-c", STEADY)
    assert plain.stdout.split()[4:6] == ["False", "True"]
    assert plain.stdout.split()[:3] != words[:3]


def test_variables_that_must_stand_before_the_start_stand(command: Command) -> None:
    show = "import os; print(*[os.environ.get(n) for n in ('CUBLAS_WORKSPACE_CONFIG', 'PYTHONHASHSEED', 'NVIDIA_TF32_OVERRIDE', 'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE')])"
    dirty = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":16:8", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    found = command("run", "--deterministic", "--", sys.executable, "-c", show, env=dirty)
    assert found.stdout.split() == [":16:8", "0", "0", "None"]
    clean = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    found = command("run", "--deterministic", "--seed", "7", "--", sys.executable, "-c", show, env=clean)
    assert found.stdout.split() == [":4096:8", "7", "0", "None"]
    found = command("run", "--seed", "7", "--", sys.executable, "-c", show, env=clean)
    assert found.stdout.split() == ["None", "7", "None", "None"]


def test_a_seed_that_python_cannot_hash_with_is_refused(command: Command) -> None:
    found = command("run", "--seed", str(2**32), "--", "true")
    assert found.returncode == 2
    assert "must be an integer from 0 to 4294967295" in found.stderr
