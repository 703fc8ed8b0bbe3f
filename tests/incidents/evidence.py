"""What two runs that parted show in their tokens, by the kind of case. Chosen from symptom and cause in words only.

The figures are those measured for docs/margins.md, over some 170 pairs of recipes: where outputs part, by which margin,
and how far the raw logits had moved by then ("ulp" is the spacing of the run's type at the largest logit).

| kind | parts at (median) | margin there | logits moved by | seen in |
| --- | --- | --- | --- | --- |
| rounding | 45 | 0 in half, else to 1 ulp | 0.5 to 2 ulp (float32: within 64 eps) | kernels, shapes, threads, devices |
| precision | 50 | 0 to 0.07, median 0.002 | 0.004 to 0.29 | types, quantisation, merged adapters |
| large | 4 | 0.0015 to 1.5, median 0.14 | 0.011 to 9.4, median 1.9 | weights, configuration, masks, faults |
| inputs | 0 | 0.0015 to 6.7, median 0.18 | 0.055 to 15 | tokenizers, templates, cut prompts |
| media | 0 | 0.0015 to 6.7 | 0.055 to 15 | pixels: equal ids, another key |
| settings | 2 | 0.009 to 9.5 | exactly 0 | penalties, decoding |
| sampled | 2 | 0.009 to 9.5 | exactly 0 | seeds, temperature, random state |
| length | at the end | | exactly 0 | stop rules, budgets |
| texts | | | not known | services: neither ids nor logits |
| scores | | | not known | functions: a value, no tokens |
"""

import math
import random
import re
from typing import NamedTuple

from provenance.explain.tokens import EPSILON32, ulp
from provenance.facts import Sequence, Step
from tests.fakes.runs import key
from tests.incidents.homes import Case

TOKENS, TOP, VOCABULARY = 96, 4, 32000


class Kind(NamedTuple):
    """The figures of one row of the table above."""

    median: float
    margin: tuple[float, float, float]  # least, median, most
    moved: tuple[float, float, float]


NONE = (0.0, 0.0, 0.0)
KINDS = {
    "rounding": Kind(45, (0, 0, 1), (0.5, 1, 2)), "precision": Kind(50, (1e-4, 0.002, 0.07), (0.004, 0.034, 0.29)),
    "large": Kind(4, (0.0015, 0.14, 1.5), (0.011, 1.9, 9.4)), "inputs": Kind(0, (0.0015, 0.18, 6.7), (0.055, 0.9, 15)),
    "media": Kind(0, (0.0015, 0.18, 6.7), (0.055, 0.9, 15)), "settings": Kind(2, (0.009, 0.3, 9.5), NONE),
    "sampled": Kind(2, (0.009, 0.3, 9.5), NONE), "length": Kind(TOKENS - 8, (0.5, 2, 6), NONE),
    "texts": Kind(0, NONE, NONE), "scores": Kind(0, NONE, NONE),
}  # fmt: skip
FAULT = r"garbage|nonsense|nan\b|far worse|is worse|worse on|bug|attend|mask|training mode|repeated token|synchronis|rotary|static|emits"
# Dimension, words in symptom and cause, kind. The first line that fits counts; an empty text fits all.
TABLE: tuple[tuple[str, str, str], ...] = (
    ("tokenizer_input", r"pixel|image|audio", "media"),
    ("tokenizer_input", r"padd?ing|mask|attended", "large"),
    ("tokenizer_input", "", "inputs"),
    ("sampling", r"max_tokens|stops early|cut off|stop string", "length"),
    ("sampling", r"seed|random|sampling on|is sampling|draw|stream|vary", "sampled"),
    ("sampling", "", "settings"),
    ("parameters", "", "settings"),
    ("weights", r"merg|re-?quantis|rounding", "precision"),
    ("weights", "", "large"),
    ("precision", r"matmul shapes|batch shape|prefix|tie", "rounding"),
    ("precision", "", "precision"),
    ("runtime_config", FAULT, "large"),
    ("runtime_config", r"changed the default|default was", "settings"),
    ("", FAULT, "large"),
    ("", "", "rounding"),
)


def kind(case: Case, runtime: str) -> str:
    """Choose the kind of evidence by what the report says was seen."""
    if runtime == "openai":
        return "texts"
    if runtime == "function":
        return "scores"
    text = f"{case.symptom} {case.root_cause}".lower()
    return next(
        name for dimension, words, name in TABLE if dimension in ("", case.dimension) and re.search(words, text)
    )


class Shown(NamedTuple):
    """The sequences of both sides."""

    a: Sequence
    b: Sequence


def sequences(name: str, dtype: str, with_logits: bool, rng: random.Random) -> Shown:
    """Make both sides of a pair of one kind."""
    ids = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(24, 200)))
    if name == "scores":
        return Shown(_value(ids, 0.731), _value(ids, 0.731 + rng.uniform(-0.01, 0.01)))
    if name == "texts":
        return Shown(_text(ids, "one answer"), _text(ids, "another answer"))
    there = _other_ids(ids, rng) if name == "inputs" else ids
    one, other = _outputs(name, dtype, rng)
    return Shown(
        _sequence(ids, one, dtype, name, "a", with_logits=with_logits),
        _sequence(there, other, dtype, name, "b", with_logits=with_logits),
    )


def _value(ids: tuple[int, ...], value: float) -> Sequence:
    return Sequence(
        0, 0, key("in", ids), key("out", [value]), input_text="a question", output_value=value, finish="returned",
        no_evidence="the output is not token ids",
    )  # fmt: skip


def _text(ids: tuple[int, ...], text: str) -> Sequence:
    return Sequence(
        0, 0, key("in", ids), key("out", text), input_text="a question", output_text=text, finish="eos",
        no_evidence="the service returns no logits",
    )  # fmt: skip


def _other_ids(ids: tuple[int, ...], rng: random.Random) -> tuple[int, ...]:
    at = rng.randrange(len(ids) // 2)
    if rng.random() < 0.5:
        return ids[:at] + ids[at + rng.randrange(1, 8) :]
    return (*ids[:at], (ids[at] + 1) % VOCABULARY, *ids[at + 1 :])


def _sequence(
    ids: tuple[int, ...], steps: list[Step], dtype: str, name: str, side: str, *, with_logits: bool
) -> Sequence:
    output = tuple(step.token for step in steps)
    media = f"{side}" if name == "media" else ""
    return Sequence(
        0, 0, key(f"in{media}", ids), key("out", output), input_ids=ids, output_ids=output, input_text=f"prompt {hash(ids)}",
        output_text=" ".join(map(str, output)), finish="length", padding=0, steps=tuple(steps) if with_logits else (),
        logits_dtype=dtype if with_logits else "", no_evidence="" if with_logits else "logprobs were not asked for",
    )  # fmt: skip


def _outputs(name: str, dtype: str, rng: random.Random) -> tuple[list[Step], list[Step]]:
    figures = KINDS[name]
    at = min(TOKENS - 1, int(figures.median * math.exp(rng.gauss(0, 0.5)))) if figures.median else 0
    moved, margin = _moved(name, dtype, rng), _margin(name, dtype, rng)
    if name == "length":
        whole = [_step(rng, 3.0, 0.0)[0] for _ in range(TOKENS)]
        return whole, whole[:at]
    one, other = [], []
    for index in range(TOKENS):
        if index < at:
            here, there = _step(rng, rng.uniform(1.0, 6.0), moved * rng.choice((0.0, 0.5, 1.0)))
        elif index == at:
            here, there = _step(rng, margin, moved, part=True)
        else:
            (here, _), (there, _) = _step(rng, 2.0, 0.0), _step(rng, 2.0, 0.0)
        one.append(here)
        other.append(there)
    return one, other


def _moved(name: str, dtype: str, rng: random.Random) -> float:
    """Return by how much the logits moved; rounding goes by the spacing of the run's type."""
    if name != "rounding":
        return _between(KINDS[name].moved, rng)
    if dtype == "float32":
        return 64 * EPSILON32 * 20 * rng.uniform(0.05, 0.3)
    return ulp(20.0, dtype) * rng.choice((0.5, 1.0, 1.5, 2.0))


def _margin(name: str, dtype: str, rng: random.Random) -> float:
    """Return the margin of the first side where the two part; in half of the ties it is nothing at all."""
    if name != "rounding":
        return _between(KINDS[name].margin, rng)
    if rng.random() < 0.5:
        return 0.0
    return 64 * EPSILON32 * 20 * rng.uniform(0, 0.05) if dtype == "float32" else ulp(20.0, dtype)


def _between(figures: tuple[float, float, float], rng: random.Random) -> float:
    """Draw a number between two bounds, on a scale of logarithms, with the median that was measured."""
    low, median, high = figures
    if not low:
        return 0.0
    bend = math.log(math.log(median / low) / math.log(high / low)) / math.log(0.5)
    return float(low * (high / low) ** (rng.random() ** bend))


def _step(rng: random.Random, margin: float, moved: float, *, part: bool = False) -> tuple[Step, Step]:
    """Make one step of both sides. Where they part, the second side chose the runner-up of the first."""
    ids = tuple(rng.sample(range(VOCABULARY), TOP))
    logits = (20.0, 20.0 - margin, 19.0 - margin, 18.0 - margin)
    there = tuple(x + moved * sign for x, sign in zip(logits, (-1, 1, rng.choice((-1, 1)), 1), strict=True))
    one = Step(ids[0], ids, logits, -0.5, margin, ids[1])
    if part:
        return one, Step(ids[1], ids, there, -0.6, abs(there[0] - there[1]), ids[0])
    return one, Step(ids[0], ids, there, -0.5, abs(there[0] - there[1]), ids[1])
