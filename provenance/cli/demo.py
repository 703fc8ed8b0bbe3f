"""demo: a real model called a few times, the records in SQL, and two runs of one prompt that part, explained."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from provenance import recorder as recorders
from provenance.capture.call import run as labelled
from provenance.capture.face import flush
from provenance.capture.wrap import wrap
from provenance.cli import render
from provenance.cli.store import query
from provenance.errors import MissingExtra, ProvenanceError
from provenance.explain import compare, story
from provenance.facts import Run
from provenance.settings import cache_home, load, places
from provenance.store import database, queries

PROMPTS = (
    "A function",
    "The first argument",
    "The exception",
    "The for statement is used to",
    "If an exception occurs in the try clause, the rest of the clause is skipped and the handler is looked for",
)
# Which prompts part depends on the processor. Where none does, the batch gets a longer companion, and so more padding.
COMPANIONS = (
    "The try statement specifies exception handlers and cleanup code for a group of statements, so that",
    "A dictionary display yields a new dictionary object, and its keys and values are evaluated in order, and then",
    "The with statement guarantees that the other method will always be called, and if an exception caused the suite \
to be exited, its type, value, and traceback are passed as arguments to it, and in that case",
)
TOKENS = 64
SQL = (
    "select started, name, batch_size as batch, padding_tokens as padding, min_margin, text_out "
    "from run_overview order by started, run_id"
)


def demo(
    real: Annotated[
        bool, typer.Option("--real", help="Use Gemma 3 270M instead of the tiny model (fetches 253 MB).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before fetching.")] = False,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=512, help="Tokens to generate.")] = TOKENS,
    db: Annotated[str, typer.Option("--db", help="Database to record into. Default: a fresh one in the cache.")] = "",
) -> int:
    """See it: a real model, two runs that part, and the reason why."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "the demo", "demo")
    model, tokenizer, prompts = _load(real, yes)
    path = Path(db) if db else _fresh()
    recorders.configure(db=str(path), writer="thread")
    wrap(model, tokenizer)
    alone = _alone(model, tokenizer, prompts, tokens)
    batch = _batch(model, tokenizer, prompts, tokens, alone)
    for companion in COMPANIONS:
        if alone != batch[: len(alone)]:
            break
        _say("   None of them answered differently here. Again, with a longer prompt beside them:\n")
        batch = _batch(model, tokenizer, (*prompts, companion), tokens, alone)
    if not flush(60):
        raise ProvenanceError(f"the database {path} did not take the records within a minute; the spool keeps them.")
    return _tell(path, prompts, alone, batch, tokenizer)


def _load(real: bool, yes: bool) -> tuple[Any, Any, tuple[str, ...]]:
    if real:
        from provenance.cli import gemma

        return *gemma.load(yes=yes), gemma.PROMPTS
    from provenance.cli import models

    _say("A tiny model, 0.8 M weights in bfloat16, trained on the texts that ship with Python.")
    return *models.tiny(), PROMPTS


def _fresh() -> Path:
    """Return the path of a new database in the cache, without what an earlier demo left there."""
    path = cache_home(os.environ) / "provenance" / "demo.db"
    spool = places(load({"db": str(path)})).spool
    for old in [*path.parent.glob(path.name + "*"), *spool.glob("*")]:
        if old.is_file():
            old.unlink()
    return path


def _alone(model: Any, tokenizer: Any, prompts: tuple[str, ...], tokens: int) -> list[str]:
    """Answer each prompt alone."""
    _say(f"\n1. Each of {len(prompts)} prompts alone, greedily: do_sample=False, nothing is drawn.\n")
    answers = []
    for prompt in prompts:
        with labelled(name="alone", tags={"demo": "alone"}):
            answers.append(_generate(model, tokenizer, [prompt], tokens)[0])
        _say(f"   {prompt} ▸ {render.clip(answers[-1], 160)}\n")
    return answers


def _batch(model: Any, tokenizer: Any, prompts: tuple[str, ...], tokens: int, alone: list[str]) -> list[str]:
    """Answer the same prompts as one batch, and say which answers are others than before."""
    _say(f"2. The same {len(prompts)} prompts as one batch, padded on the left to one length.\n")
    with labelled(name="batch", tags={"demo": "batch"}):
        answers = _generate(model, tokenizer, list(prompts), tokens)
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        before = alone[n] if n < len(alone) else answer
        same = render.common(before, answer)
        told = "= as alone" if before == answer else f"≠ {render.clip('…' + answer[max(0, same - 30) :], 120)}"
        _say(f"   {prompt} ▸ {told}\n")
    return answers


def _generate(model: Any, tokenizer: Any, prompts: list[str], tokens: int) -> list[str]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=tokens, do_sample=False
    )
    new = output[:, inputs["input_ids"].shape[1] :]
    return [tokenizer.decode(row, skip_special_tokens=True) for row in new]


def _tell(path: Path, prompts: tuple[str, ...], alone: list[str], batch: list[str], tokenizer: Any) -> int:
    spots = places(load({"db": str(path)}))
    engine = database.reading(spots.url, spots.database)
    _say("3. What was recorded, in SQL:\n")
    _say(f"   {SQL}\n")
    heads, rows, _ = query(engine, SQL, 100)
    render.table(heads, [[*row[:-1], render.clip(str(row[-1]), 44)] for row in rows])
    parted = [n for n, (one, other) in enumerate(zip(alone, batch, strict=False)) if one != other]
    if not parted:
        _say("\n4. No prompt answered differently in a batch on this machine; try --tokens 256.")
        return 0
    _say(f"\n4. {len(parted)} of {len(prompts)} prompts answered differently in the batch. Why?\n")
    chosen, answer = _clearest(engine, parted, len(prompts))
    _say(f"   provenance diff {answer['a']['run'][:18]} {answer['b']['run'][:18]}:{chosen} --db {path}\n")

    def text(token: int) -> str:
        return str(tokenizer.decode([token]))

    render.lines(story.lines(answer, text, text))
    _say(f"\nThe database is {path}. Look around: provenance log --db {path}")
    return 0


def _clearest(engine: Any, parted: list[int], count: int) -> tuple[int, dict[str, Any]]:
    """Explain the prompts that parted, and return the one that parts first; one that was padded, if there is one."""
    batch: Run = queries.load(engine, queries.log(engine, 1, name="batch")[0].run_id)
    alone = [line.run_id for line in reversed(queries.log(engine, count, name="alone"))]
    answers = [(n, compare.compare(queries.load(engine, alone[n]), batch, None, (n, None))) for n in parted]
    padded = {s.row for s in batch.sequences if s.padding}
    return min(answers, key=lambda item: (item[0] not in padded, item[1]["outputs"]["first_divergent_token"] or 0))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
