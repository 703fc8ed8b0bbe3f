"""What holds of a model on this machine: measured on its own answers, and read off from no flag.

    report = probe("path/to/checkpoint", batch=8)      # or "module:function", or a model and its tokenizer
    print(report)
    assert report.code(["run-to-run", "fixed-shapes"]) == 0

Each prompt is asked alone and in a batch, twice each in turn (the four arms bs1_a, bsN_a, bs1_b, bsN_b), with padding,
in batches of one shape, without the cache, with another attention, with other threads, and in a second process.
Tokens are compared, and logits bit for bit. Where a repeat of the same call differs, no other difference can be told
from that, and the report says so. Switches, random states and the model's own settings are as before when it is over.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from provenance.capture.call import run as labelled
from provenance.capture.wrap import wrap
from provenance.determinism import seeds
from provenance.determinism.mode import deterministic
from provenance.determinism.pins import ATTENTION, pinned
from provenance.determinism.report import ABSENT
from provenance.errors import BadSetting, ProvenanceError, UsageError
from provenance.replay import arms, fresh
from provenance.replay.arms import Answer, Difference, Ids, Subject
from provenance.replay.fresh import TAGS

HOLDS, TOKENS, BROKEN, UNTESTED = "holds", "tokens hold, logits move", "broken", "not tested"
RUN, COLD, BATCH, SHAPES, HELD, PADDING, CACHE, ATTENDING, THREADS, PROCESSES = (
    "run-to-run", "cold-and-warm", "batch-invariant", "fixed-shapes", "fixed-shapes-pinned", "padding-invariant",
    "cache-invariant", "attention-invariant", "thread-invariant", "across-processes",
)  # fmt: skip
# What is compared, and what helps where it does not hold.
PROPERTIES: dict[str, tuple[str, str]] = {
    RUN: ("the same call again, alone and in a batch", "probe again with --deterministic"),
    COLD: ("the first call after loading, and a later one", "one call before those that count"),
    BATCH: ("a prompt alone, and in a batch of prompts of its own length", ""),
    SHAPES: ("alone and in company, where every call has one shape", ""),
    HELD: ("the same, under deterministic(attention='math') and, on a CPU, with one thread", "batches of one prompt"),
    PADDING: ("a prompt with pad tokens beside it, under the mask", "pad every call to the same lengths, or none"),
    CACHE: ("with the cache of keys and values, and without", "pinned(model, cache=True)"),
    ATTENDING: ("one attention implementation and another", "pinned(model, attention=NAME), or NAME as it loads"),
    THREADS: ("one number of threads and another", "pinned(model, threads=N), or OMP_NUM_THREADS=N"),
    PROCESSES: ("this process and a fresh one", "provenance run --deterministic --seed N -- ..."),
}
PADS = (1, 7, 16)
BUCKET = 16  # fixed shapes are padded to multiples of it, with one pad token at least, as `Shapes` does
LIVE = "the model was loaded by its program; give the folder of a checkpoint, or module:function"
REPEATS = "a repeat of the same call differs too, so this cannot be told from that"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to probe: rows of a batch, new tokens, under ``deterministic()`` or not, recorded or not, and where."""

    batch: int = 8
    tokens: int = 16
    steady: bool = False
    record: bool = False
    device: str = ""

    def __post_init__(self) -> None:
        if self.batch < 2 or self.tokens < 1:
            raise BadSetting(f"a batch of {self.batch} and {self.tokens} tokens: give 2 rows and 1 token at least.")


@dataclass(slots=True)
class Verdict:
    """What was seen of one property: of how many prompts, how many moved, how many turned a token, and the first."""

    name: str
    prompts: set[int] = field(default_factory=set)
    moved: set[int] = field(default_factory=set)
    turned: set[int] = field(default_factory=set)
    first: tuple[int, str, Difference] | None = None  # prompt, what was compared, how it differs
    worst: float = 0.0  # ulps
    because: str = ""  # why it was not tested

    def add(self, prompt: int, what: str, found: Difference | None) -> None:
        """Count one comparison. A token that turned is shown before logits that only moved."""
        self.prompts.add(prompt)
        if found is None:
            return
        self.moved.add(prompt)
        self.worst = max(self.worst, found.ulps)
        turned = found.token is not None
        if turned:
            self.turned.add(prompt)
        if self.first is None or (turned and self.first[2].token is None):
            self.first = prompt, what, found

    @property
    def state(self) -> str:
        """Return one of holds; tokens hold, logits move; broken; not tested."""
        if self.because or not self.prompts:
            return UNTESTED
        return BROKEN if self.turned else TOKENS if self.moved else HOLDS

    def document(self) -> dict[str, Any]:
        """Return the verdict as a document for JSON."""
        first = None
        if self.first is not None:
            first = {"prompt": self.first[0], "compared": self.first[1], **self.first[2].document()}
        return {"property": self.name, "state": self.state, "compared": PROPERTIES[self.name][0],
                "prompts": len(self.prompts), "moved": len(self.moved), "turned": len(self.turned),
                "worst_ulps": self.worst, "first": first, "because": self.because or None}  # fmt: skip

    def __str__(self) -> str:
        total, state = len(self.prompts), self.state
        if state == UNTESTED:
            return f"{self.name:<20} {state}: {self.because or 'no prompt could be asked'}"
        if state == HOLDS:
            return f"{self.name:<20} {state} ({total} of {total} prompts, bit for bit)"
        counts = f"logits of {len(self.moved)} of {total} prompts move, by {self.worst:.3g} ulps at most"
        turned = f"{len(self.turned)} of {total} prompts turn a token; " if state == BROKEN else ""
        return f"{self.name:<20} {state} ({turned}{counts})\n{self._first()}"

    def _first(self) -> str:
        assert self.first is not None
        prompt, what, found = self.first
        token = f"token {found.token} is {found.one} and {found.other}; " if found.token is not None else ""
        move = f"logits move at step {found.step}, by {found.moved:.3g} ({found.ulps:.3g} ulps)"
        return f"    first: prompt {prompt}, {what}: {token}{move}"


@dataclass(slots=True)
class Report:
    """What was probed, and a verdict for each property. ``print`` it."""

    about: dict[str, Any]
    verdicts: list[Verdict]

    def __getitem__(self, name: str) -> Verdict:
        return next(item for item in self.verdicts if item.name == name)

    def code(self, required: Sequence[str]) -> int:
        """Return the exit code: 0 all that is required holds, 1 something does not, 3 something was not tested.

        ``fixed-shapes:tokens`` asks for the same tokens alone, ``all`` for every property. Raises BadSetting for a
        property that there is not.
        """
        codes = {0}
        for name, level in checked(required):
            state = self[name].state
            good = state == HOLDS or (level == "tokens" and state == TOKENS)
            codes.add(3 if state == UNTESTED else 0 if good else 1)
        return 1 if 1 in codes else max(codes)

    def document(self) -> dict[str, Any]:
        """Return the report as a document for JSON."""
        found = [item.document() | {"try": self._cure(item) or None} for item in self.verdicts]
        return {"schema": "provenance/probe/1", "about": self.about, "properties": found}

    def _cure(self, item: Verdict) -> str:
        if item.state in (HOLDS, UNTESTED):
            return ""
        if item.name not in (BATCH, SHAPES):
            return PROPERTIES[item.name][1]
        shapes = "one shape for every call (determinism.batches)"
        held = "deterministic(attention='math') and pinned(model, threads=1)"
        for name, how in ((SHAPES, shapes), (HELD, f"{shapes} under {held}")):
            if name != item.name and self[name].state in (HOLDS, TOKENS):
                return f"{how}: {self[name].state} here"
        return "batches of one prompt: one shape for every call does not help here"

    def __str__(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        lines = [about, ""]
        for item in self.verdicts:
            lines.append(str(item))
            if self._cure(item):
                lines.append(f"    try: {self._cure(item)}")
        return "\n".join(lines)


def checked(required: Sequence[str]) -> list[tuple[str, str]]:
    """Return each property that is required, and on which level: of the bits, or of the tokens alone.

    >>> checked(["run-to-run", "fixed-shapes:tokens"])
    [('run-to-run', ''), ('fixed-shapes', 'tokens')]

    Raises BadSetting for a property that there is not.
    """
    found = []
    for item in required:
        name, _, level = item.partition(":")
        if name not in (*PROPERTIES, "all") or level not in ("", "tokens"):
            raise BadSetting(f"there is no property {item!r}; there are {', '.join(PROPERTIES)}, and all.")
        found += [(one, level) for one in (PROPERTIES if name == "all" else [name])]
    return found


def probe(target: Any, tokenizer: Any = None, prompts: Sequence[str | Ids] | None = None, **settings: Any) -> Report:
    """Ask a model in several ways, and say what of its answers holds.

    ``target`` is the folder of a checkpoint, ``module:function`` that returns a model (and a tokenizer), or a live
    model, of which a fresh process cannot be asked. ``prompts`` are texts or lists of token ids; ``settings`` are the
    fields of `Plan`. A model that is being recorded stays so: its runs bear the tag ``probe=determinism``.

    Raises UsageError for what cannot be asked, BadFile where there is no such model.
    """
    try:
        plan = Plan(**settings)
    except TypeError as error:
        raise BadSetting(f"probe takes {', '.join(Plan.__slots__)}: {error}.") from None
    verdicts = {name: Verdict(name) for name in PROPERTIES}
    named = str(target) if isinstance(target, (str, Path)) else ""
    with tempfile.TemporaryDirectory(prefix="provenance-probe-") as folder:
        if named:
            arms.check(named)
            verdicts[PROCESSES].because = fresh.ask(named, prompts, asdict(plan), Path(folder))
        else:
            verdicts[PROCESSES].because = verdicts[COLD].because = LIVE
        with _as_before(), labelled(tags=TAGS), _mode(plan) as late:
            model, tokenizer = arms.load(named, plan.device) if named else (target, tokenizer)
            subject = Subject(wrap(model, tokenizer) if plan.record else model, tokenizer, plan.tokens)
            rows = arms.tokenized(prompts, model, tokenizer)
            about = _about(subject, rows, plan, late)
            _Probe(subject, rows, plan, verdicts).run(Path(folder), loaded=bool(named))
    if verdicts[RUN].moved:
        for item in verdicts.values():
            if item.name != RUN and item.moved and not item.because:
                item.because = REPEATS
    return Report(about, list(verdicts.values()))


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    states = seeds.states()
    try:
        yield
    finally:
        seeds.restore(states)


@contextlib.contextmanager
def _mode(plan: Plan) -> Iterator[int]:
    """Hold the switches, if that was asked for; yield how many could not be."""
    if not plan.steady:
        yield 0
        return
    import torch  # noqa: F401 - what is not loaded cannot be held

    with deterministic() as report:
        yield len(report.of("cannot be set any more"))


def _about(subject: Subject, rows: list[Ids], plan: Plan, late: int) -> dict[str, Any]:
    torch = sys.modules["torch"]
    transformers = sys.modules.get("transformers")
    found = {
        "model": type(subject.model).__name__, "dtype": subject.dtype, "device": subject.device,
        "threads": torch.get_num_threads(), "attention": _attention(subject.model), "prompts": len(rows),
        "tokens": plan.tokens, "batch": plan.batch, "torch": torch.__version__,
        "transformers": getattr(transformers, "__version__", "none"),
    }  # fmt: skip
    return found | ({"deterministic": f"on, {late} switches too late"} if plan.steady else {})


def _attention(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


class _Probe:
    """One subject, its prompts, and the verdicts that grow."""

    def __init__(self, subject: Subject, rows: list[Ids], plan: Plan, verdicts: dict[str, Verdict]) -> None:
        self.subject, self.rows, self.plan, self.verdicts = subject, rows, plan, verdicts

    def run(self, folder: Path, loaded: bool) -> None:
        """Ask everything, prompt by prompt, so that the logits of one prompt at a time are held."""
        try:
            cold = self.subject.ask([self.rows[0]])
        except ProvenanceError:
            raise
        except Exception as error:
            raise UsageError(f"the model cannot be asked: {arms.said(error)}.") from error
        if loaded:
            warm = self.subject.ask([self.rows[0]])
            self._tell(COLD, 0, "the first call of this process and a later one", cold, warm)
            one, other = fresh.read(folder, "cold"), fresh.read(folder, "0")
            if one is not None and other is not None:
                self._tell(COLD, 0, "the first call of a fresh process and a later one", one, other)
        for n, row in enumerate(self.rows):
            self._prompt(n, row, folder)

    def _prompt(self, n: int, row: Ids, folder: Path) -> None:
        ask, size = self.subject.ask, self.plan.batch
        crowd = [row, *self._company(n, len(row))]
        one, many = ask([row]), ask(crowd)  # bs1_a, bsN_a
        self._tell(RUN, n, "alone, twice", one, ask([row]))  # bs1_b
        self._tell(RUN, n, f"in a batch of {size}, twice", many, ask(crowd))  # bsN_b
        self._tell(BATCH, n, f"alone and in a batch of {size}", one, many)
        self._try(SHAPES, lambda: self._shapes(SHAPES, n, row))
        self._try(HELD, lambda: self._held(n, row))
        self._try(PADDING, lambda: self._padding(n, row, one))
        what = "with the cache and without"
        self._try(CACHE, lambda: self._tell(CACHE, n, what, ask([row], use_cache=True), ask([row], use_cache=False)))
        self._try(ATTENDING, lambda: self._attending(n, row, one))
        self._try(THREADS, lambda: self._threads(n, row, one))
        there = fresh.read(folder, str(n))
        if there is not None:
            self._tell(PROCESSES, n, "here and in a fresh process", one, there)

    def _tell(self, name: str, prompt: int, what: str, one: Answer, other: Answer) -> None:
        self.verdicts[name].add(prompt, what, arms.compare(one, other, self.subject.dtype))

    def _try(self, name: str, work: Callable[[], object]) -> None:
        """Do one arm. A model that cannot be asked in this way is not tested, and the others go on."""
        if self.verdicts[name].because:
            return
        try:
            work()
        except Exception as error:
            self.verdicts[name].because = arms.said(error)

    def _company(self, n: int, length: int) -> list[Ids]:
        """Return other prompts, each brought to one length, so that a batch needs no padding."""
        others = [other[::-1] if other is self.rows[n] else other for other in self._neighbours(n)]
        return [(other * (length // len(other) + 1))[:length] for other in others]

    def _padding(self, n: int, row: Ids, one: Answer) -> None:
        for count in PADS:
            what = f"with {count} pad token{'s' * (count > 1)} and without"
            self._tell(PADDING, n, what, one, self.subject.ask([row], length=len(row) + count))

    def _held(self, n: int, row: Ids) -> None:
        """Ask with all of the toolkit on: over several threads a row can be summed otherwise at another place."""
        threads = 1 if self.subject.device.startswith("cpu") else 0
        with deterministic(attention="math"), pinned(self.subject.model, threads=threads):
            self._shapes(HELD, n, row)

    def _shapes(self, name: str, n: int, row: Ids) -> None:
        """Ask as `determinism.batches` does, alone and as the last row of a full batch, padded to one length."""
        length, size = (len(row) // BUCKET + 1) * BUCKET, self.plan.batch
        others = [other[: length - 1] for other in self._neighbours(n)]
        one = self.subject.ask([row] * size, length=length)
        what = f"alone and in company in batches of {size} rows of {length}"
        self._tell(name, n, what, one, self.subject.ask([*others, row], keep=size - 1, length=length))

    def _neighbours(self, n: int) -> list[Ids]:
        return [self.rows[(n + k) % len(self.rows)] for k in range(1, self.plan.batch)]

    def _attending(self, n: int, row: Ids, one: Answer) -> None:
        now = _attention(self.subject.model)
        why = ""
        for other in ("eager", "sdpa"):
            if other == now:
                continue
            with pinned(self.subject.model, attention=other) as held:
                if held.report[ATTENTION].outcome == ABSENT:
                    why = held.report[ATTENTION].reason
                    continue
                answer = self.subject.ask([row])
            self._tell(ATTENDING, n, f"{now} and {other}", one, answer)
        if why and n not in self.verdicts[ATTENDING].prompts:
            self.verdicts[ATTENDING].because = why

    def _threads(self, n: int, row: Ids, one: Answer) -> None:
        if not self.subject.device.startswith("cpu"):
            self.verdicts[THREADS].because = f"the model computes on {self.subject.device}"
            return
        now = sys.modules["torch"].get_num_threads()
        other = 1 if now > 1 else 2
        with pinned(self.subject.model, threads=other):
            answer = self.subject.ask([row])
        self._tell(THREADS, n, f"{now} and {other} thread{'s' * (other > 1)}", one, answer)
