"""One model asked in several ways, and two of its answers compared bit for bit.

An answer is the tokens of one row and the raw logits of each step. A question is greedy and of a fixed length, so that
no end token cuts a comparison short; what the model's own settings do to the scores stays as it is.
"""

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from provenance.determinism.batches import Shapes
from provenance.errors import BadFile, BadSetting, MissingExtra, UsageError
from provenance.explain.tokens import ulp

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
BITS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
# What a person asks a model in plain words, of several lengths; a model without a tokenizer gets numbers instead.
TEXTS = (
    "The for statement is used to",
    "Explain in one sentence why the sky is blue.",
    "A function",
    "List three prime numbers greater than one hundred and say how you know that each of them is prime.",
    "If an exception occurs in the try clause, the rest of the clause is skipped and the handler is looked for",
    "Translate into French: the train leaves at noon.",
    "Once upon a time",
    "A dictionary display yields a new dictionary object, and its keys and values are evaluated in order, and then",
)
Ids = list[int]


class Answer(NamedTuple):
    """What one row was answered: its new tokens, and the raw logits of each step, on the CPU."""

    tokens: Ids
    logits: Any


@dataclass(frozen=True, slots=True)
class Difference:
    """How two answers of one prompt differ. ``token`` is None where the tokens are the same."""

    step: int  # the first step whose logits are not the same bits
    token: int | None  # the first token that differs
    one: int | None
    other: int | None
    moved: float  # the largest change of a logit up to the token that differs
    ulps: float

    def document(self) -> dict[str, Any]:
        """Return it as a document for JSON."""
        return {"step": self.step, "token": self.token, "one": self.one, "other": self.other,
                "moved": self.moved, "ulps": self.ulps}  # fmt: skip


def compare(one: Answer, other: Answer, dtype: str) -> Difference | None:
    """Return how two answers differ, None where they are the same bits. Behind a token that differs nothing counts.

    ``dtype`` is the type that the model computes in: its spacing at the largest logit is the unit of the move.
    """
    import torch

    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    least = min(len(one.tokens), len(other.tokens))
    at = next((n for n, (x, y) in pairs if x != y), None if len(one.tokens) == len(other.tokens) else least)
    last = min(least, at + 1) if at is not None else least
    here, there = one.logits[:last], other.logits[:last]
    if here.shape != there.shape or here.dtype != there.dtype:
        raise UsageError(f"a model gave logits of {here.dtype} and of {there.dtype}; it cannot be probed.")
    bits = getattr(torch, BITS[here.element_size()])
    apart = (here.contiguous().view(bits) != there.contiguous().view(bits)).any(dim=1)
    if at is None and not bool(apart.any()):
        return None
    step = int(apart.nonzero()[0]) if bool(apart.any()) else int(at or 0)
    change = (here.double() - there.double()).abs()
    change = torch.where(here == there, torch.zeros_like(change), change)  # two infinities
    moved = float(change.max()) if change.numel() else 0.0
    finite = here[step : step + 1][torch.isfinite(here[step : step + 1])] if step < last else here[:0]
    unit = ulp(float(finite.abs().max()) if finite.numel() else 0.0, dtype)
    return Difference(step, at, _at(one.tokens, at), _at(other.tokens, at), moved, moved / unit if unit else 0.0)


def _at(tokens: Ids, place: int | None) -> int | None:
    return tokens[place] if place is not None and place < len(tokens) else None


class Subject:
    """A model under probe. Nothing of it is changed by asking."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int) -> None:
        if not callable(getattr(model, "generate", None)):
            raise UsageError(f"a {type(model).__qualname__} has no generate, so it cannot be probed.")
        self.model, self.tokenizer, self.tokens = model, tokenizer, tokens
        self.pad = _pad(model, tokenizer)
        self.encoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))

    @property
    def dtype(self) -> str:
        """Return the type that the model computes in."""
        return str(getattr(self.model, "dtype", "float32")).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Return the device that the model lies on."""
        return str(getattr(self.model, "device", "cpu"))

    def ask(self, rows: Sequence[Ids], keep: int = 0, length: int = 0, **settings: Any) -> Answer:
        """Ask for several rows in one call, padded to their longest or to ``length``; return what one was answered."""
        import torch

        side = "right" if self.encoder else "left"
        shape = Shapes(len(rows), (max(length, *map(len, rows)),), self.pad, side, 0)
        (batch,) = shape.batches(rows)
        ids = torch.tensor(batch.ids, device=self.model.device)
        wanted = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": self.tokens,
                  "min_new_tokens": self.tokens, "pad_token_id": self.pad, **settings}  # fmt: skip
        with torch.no_grad():
            made = self.model.generate(ids, attention_mask=torch.tensor(batch.mask, device=self.model.device),
                                       output_logits=True, return_dict_in_generate=True, **wanted)  # fmt: skip
        skip = 1 if self.encoder else ids.shape[1]
        logits = torch.stack([step[keep] for step in made.logits]).cpu()
        return Answer([int(token) for token in made.sequences[keep, skip:]], logits)


def _pad(model: Any, tokenizer: Any) -> int:
    own = getattr(model, "generation_config", None)
    ends = getattr(own, "eos_token_id", None)
    for value in (getattr(own, "pad_token_id", None), getattr(tokenizer, "pad_token_id", None),
                  ends[0] if isinstance(ends, list) and ends else ends):  # fmt: skip
        if isinstance(value, int):
            return value
    return 0  # hidden by the mask


# -- loading ----------------------------------------------------------------------------------------


def load(target: str, device: str = "") -> tuple[Any, Any]:
    """Load a model and its tokenizer, None where it has none: from a checkpoint's folder, or from a function.

    ``module:function`` is imported with the working directory on the path, as ``python -m`` does, and called without
    arguments; it returns the model, or the model and a tokenizer.

    Raises BadFile or UsageError where there is no such thing, MissingExtra without torch and transformers.
    """
    check(target)
    path = Path(target).expanduser()
    if path.is_dir():
        return _folder(path, device)
    model, tokenizer = _function(target)
    return (model.to(device) if device else model), tokenizer


def check(target: str) -> None:
    """Say whether there can be such a model, before anything is loaded.

    Raises BadFile.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadFile(f"{path} holds no config.json, so it is no checkpoint.")
    elif path.exists():
        raise BadFile(f"{target} is a file; give the folder of a checkpoint, or module:function.")
    elif not FUNCTION.fullmatch(target):
        raise BadFile(f"there is no folder {target}; give the folder of a checkpoint, or module:function.")


def _folder(path: Path, device: str) -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "loading a model", "transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        word = "dtype" if "dtype" in inspect.signature(transformers.PretrainedConfig).parameters else "torch_dtype"
        model = kind.from_pretrained(path, config=config, local_files_only=True, **{word: "auto"}).eval()
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        raise BadFile(f"{path} cannot be loaded: {_first(error)}.") from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # a folder without one raises whatever its type of model makes of that
        tokenizer = None
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(where), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise BadSetting(f"the model cannot go to the device {where!r}: {_first(error)}.") from None


def _function(target: str) -> tuple[Any, Any]:
    name, _, function = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{target} cannot be imported: {error}.") from None
    except Exception as error:
        raise UsageError(f"{name} raised as it was imported: {type(error).__name__}: {_first(error)}.") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise UsageError(f"the module {name} has no function {function}.")
    try:
        made = make()
    except Exception as error:
        raise UsageError(f"{target}() raised {type(error).__name__}: {_first(error)}.") from error
    model, tokenizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not callable(getattr(model, "generate", None)):
        raise UsageError(f"{target}() returned a {type(model).__qualname__}, which has no generate.")
    return model, tokenizer


def said(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    return f"{type(error).__name__}: {_first(error)}"


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300].rstrip(".")


# -- prompts ----------------------------------------------------------------------------------------


def read(path: Path) -> list[str | Ids]:
    """Read prompts: a JSON list of texts or of lists of token ids, or a text file with one prompt a line.

    Raises BadFile.
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise BadFile(f"there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"{path} cannot be read: {error}.") from None
    if path.suffix != ".json":
        found: list[str | Ids] = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            form = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadFile(f"{path} is not JSON: {error}.") from None
        if not isinstance(form, list) or not all(map(_is_prompt, form)):
            raise BadFile(f"{path} must hold a list of texts, or of lists of token ids.")
        found = form
    if not found:
        raise BadFile(f"{path} holds no prompt.")
    return found


def _is_prompt(item: object) -> bool:
    return isinstance(item, str) or (isinstance(item, list) and bool(item) and all(type(n) is int for n in item))


def tokenized(prompts: Sequence[str | Ids] | None, model: Any, tokenizer: Any) -> list[Ids]:
    """Return prompts as token ids; without prompts, some of our own: texts, or drawn numbers without a tokenizer.

    Raises UsageError for texts without a tokenizer, and for what is no prompt.
    """
    size = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0)
    if prompts is None and tokenizer is None:
        return _drawn(size or 256)
    found = []
    for n, prompt in enumerate(TEXTS if prompts is None else prompts):
        if not _is_prompt(prompt):
            raise UsageError(f"prompt {n} is a {type(prompt).__name__}; give a text or a list of token ids.")
        if isinstance(prompt, str):
            if tokenizer is None:
                raise UsageError("there is no tokenizer for prompts of text; give token ids, as JSON.")
            prompt = [int(token) for token in tokenizer(prompt)["input_ids"]]  # noqa: PLW2901
        if not prompt or min(prompt) < 0 or (size and max(prompt) >= size):
            raise UsageError(f"prompt {n} is empty or holds an id outside of the model's {size} tokens.")
        found.append(list(prompt))
    if not found:
        raise UsageError("there is no prompt to ask.")
    return found


def _drawn(size: int) -> list[Ids]:
    """Draw token ids by a generator of our own, so that nothing of the program's random state moves."""
    state, rows = 1, []
    for length in (6, 24, 9, 17, 31, 12, 40, 20):
        row = []
        for _ in range(length):
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            row.append(3 % size + (state >> 33) % max(1, size - 3))
        rows.append(row)
    return rows
