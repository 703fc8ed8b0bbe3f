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
