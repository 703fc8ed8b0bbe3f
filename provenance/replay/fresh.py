"""A second process, asked the same: it loads the model anew, answers every prompt alone, and leaves what it answered.

Logits lie in a folder of the process that asked, one file a prompt, as they lay in memory; tokens and shapes beside
them as JSON. ``cold`` is the first call after loading, which is asked again as prompt 0.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from provenance.capture.call import run as labelled
from provenance.capture.wrap import wrap
from provenance.determinism.mode import deterministic
from provenance.errors import ProvenanceError
from provenance.replay import arms
from provenance.replay.arms import Answer, Subject

ANSWERS = "answers.json"
TAGS = {"probe": "determinism"}


def ask(target: str, prompts: Sequence[Any] | None, plan: dict[str, Any], folder: Path) -> str:
    """Ask a model in a process of its own; return why that did not work, or an empty text."""
    torch = sys.modules.get("torch")
    order = {"target": target, "prompts": list(prompts) if prompts is not None else None, "plan": plan,
             "threads": torch.get_num_threads() if torch is not None else 0}  # fmt: skip
    environ = dict(os.environ)
    source = str(Path(__file__).parents[2])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, environ.get("PYTHONPATH", "")]))
    if not plan["record"]:
        environ["PROVENANCE_DISABLED"] = "1"
    command = [sys.executable, "-m", "provenance.replay.fresh", str(folder)]
    try:
        made = subprocess.run(
            command, input=json.dumps(order), capture_output=True, text=True, check=False, env=environ
        )
    except (OSError, TypeError, ValueError) as error:  # no process; prompts that are none, which is said later
        return arms.said(error)
    if made.returncode:
        last = (made.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        return f"the fresh process ended with {made.returncode}: {last}"
    return ""


def read(folder: Path, name: str) -> Answer | None:
    """Read one answer of the fresh process, if there is one."""
    import torch

    try:
        entry = json.loads((folder / ANSWERS).read_text("utf-8")).get(name)
    except FileNotFoundError:
        return None
    if entry is None:
        return None
    flat = torch.frombuffer(bytearray((folder / f"{name}.bin").read_bytes()), dtype=getattr(torch, entry["dtype"]))
    return Answer(entry["tokens"], flat.view(entry["shape"]))


def _write(folder: Path, name: str, answer: Answer) -> dict[str, Any]:
    import torch

    answer.logits.contiguous().view(torch.uint8).numpy().tofile(folder / f"{name}.bin")
    dtype = str(answer.logits.dtype).removeprefix("torch.")
    return {"tokens": answer.tokens, "shape": list(answer.logits.shape), "dtype": dtype}


def main() -> int:
    """Be the fresh process."""
    order, folder = json.load(sys.stdin), Path(sys.argv[1])
    plan = order["plan"]
    try:
        import torch

        if order["threads"]:
            torch.set_num_threads(order["threads"])
        with labelled(tags=TAGS), deterministic() if plan["steady"] else contextlib.nullcontext():
            model, tokenizer = arms.load(order["target"], plan["device"])
            subject = Subject(wrap(model, tokenizer) if plan["record"] else model, tokenizer, plan["tokens"])
            rows = arms.tokenized(order["prompts"], model, tokenizer)
            found = {"cold": _write(folder, "cold", subject.ask([rows[0]]))}
            found |= {str(n): _write(folder, str(n), subject.ask([row])) for n, row in enumerate(rows)}
    except ProvenanceError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    (folder / ANSWERS).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
