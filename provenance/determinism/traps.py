"""Traps in decoding settings: small pure rules over fields, each with its versions, its cost and its cure.

A rule looks at the fields of a recorded run, of a model folder or of a live model, and says what stands there that does
something nobody asked for, or looks as if it did and does nothing. The tests show each rule of transformers on the
installed version: the outputs differ, or they do not and the rule says harmless.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from provenance.errors import BadFile
from provenance.facts import Field, Run, State

TRAP, HARMLESS = "trap", "harmless"
# Sampling settings, and the values at which they do nothing.
DRAWN: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,), "top_k": (0, 50), "top_p": (1.0,), "min_p": (0.0,), "top_h": (), "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
}  # fmt: skip
# Settings that change scores before the best token is taken, and the values at which they do nothing.
ACTING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,), "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,), "bad_words_ids": ([],), "sequence_bias": ({}, []), "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],), "min_new_tokens": (0,), "min_length": (0,), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "watermarking_config": (),
    "guidance_scale": (1.0,),
    "penalty_alpha": (0.0,), "token_healing": (False,), "dola_layers": (),
}  # fmt: skip


class Facts:
    """What rules ask: values of fields, who set them, and the version of the library."""

    def __init__(self, fields: Mapping[str, Field], runtime: str, bare_pads: bool | None = None) -> None:
        self.fields = fields
        self.runtime = runtime
        self.bare_pads = bare_pads  # pad tokens at the edge of a prompt with no mask over them; None: not known

    def value(self, name: str) -> Any:
        """Return a field's value, or None where it has none."""
        found = self.fields.get(name)
        return found.value if found is not None and found.state is State.VALUE else None

    def source(self, name: str) -> str:
        """Return who set a field."""
        found = self.fields.get(name)
        return found.source if found is not None else ""

    def setting(self, name: str) -> Any:
        """Return a setting of generate."""
        return self.value(f"generation.{name}")

    @property
    def sampled(self) -> bool:
        """Say whether tokens are drawn; greedy is the library's default."""
        return self.setting("do_sample") is True


class Hit(NamedTuple):
    """What a rule found: the field, why it matters here, and the line that settles it."""

    field: str
    because: str
    write: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One trap. ``versions`` is the range it is said of, ``shown`` where the tests show it."""

    name: str
    runtime: str
    find: Callable[[Facts], Iterator[Hit]]
    cost: str  # what following the advice costs
    versions: str = ">=4.50"
    shown: str = "5.24"
    kind: str = TRAP


@dataclass(frozen=True, slots=True)
class Finding:
    """A trap found, or a setting found harmless."""

    rule: Rule
    hit: Hit
    value: Any
    source: str
    note: str = ""

    def document(self) -> dict[str, Any]:
        """Return the finding as a document for JSON."""
        return {"rule": self.rule.name, "kind": self.rule.kind, "field": self.hit.field, "value": self.value,
                "set_by": self.source, "because": self.hit.because, "write": self.hit.write, "cost": self.rule.cost,
                "versions": f"{self.rule.runtime} {self.rule.versions}".strip(), "shown": self.rule.shown,
                "note": self.note}  # fmt: skip


def _inert(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or value in neutral


# -- transformers -----------------------------------------------------------------------------------


def _ignored(facts: Facts) -> Iterator[Hit]:
    if facts.sampled or facts.setting("penalty_alpha"):
        return
    for name, neutral in DRAWN.items():
        if not _inert(facts.setting(name), neutral):
            yield Hit(f"generation.{name}", "greedy decoding reads it nowhere: tokens, scores and random state are "
                      "the same without it", f"{name}=None")  # fmt: skip


def _acting(facts: Facts) -> Iterator[Hit]:
    if facts.sampled:
        return
    for name, neutral in ACTING.items():
        if not _inert(facts.setting(name), neutral):
            write = f"{name}={neutral[0]!r}" if neutral else f"model.generation_config.{name} = None"
            yield Hit(f"generation.{name}", "it changes scores before the best token is taken: greedy decoding with it "
                      "is another function", write)  # fmt: skip


def _clock(facts: Facts) -> Iterator[Hit]:
    limit = facts.setting("max_time")
    if limit is not None and limit != float("inf"):
        yield Hit("generation.max_time", "it stops by the clock: a slower machine gives a shorter answer",
                  "max_time=None, max_new_tokens=N")  # fmt: skip


def _supplied(facts: Facts) -> Iterator[Hit]:
    """Find what a checkpoint brought along and nobody wrote down."""
    if not facts.sampled:
        return
    for name in ("do_sample", *DRAWN):
        full = f"generation.{name}"
        if facts.source(full) == "model" and not _inert(facts.setting(name), DRAWN.get(name, (False,))):
            because = (
                "generation_config.json of the checkpoint supplies it, and an update of the checkpoint can change it"
            )
            write = "do_sample=False" if name == "do_sample" else f"{name}={facts.setting(name)!r}"
            yield Hit(full, because, write)


def _top_k(facts: Facts) -> Iterator[Hit]:
    value, by = facts.setting("top_k"), facts.source("generation.top_k")
    if facts.sampled and (value is None or (value == 50 and by not in ("call", "call.generation_config", "model"))):
        yield Hit("generation.top_k", "nobody set it, and the library puts 50: all but the 50 best tokens are cut",
                  "top_k=0, or the value that is meant")  # fmt: skip


def _cold(facts: Facts) -> Iterator[Hit]:
    if facts.sampled and facts.setting("temperature") == 0:
        yield Hit(
            "generation.temperature", "do_sample with a temperature of 0 raises; greedy is meant", "do_sample=False"
        )


def _right(facts: Facts) -> Iterator[Hit]:
    if facts.value("model.is_encoder_decoder") is True:
        return
    called = "batch.size" in facts.fields  # of a call what counts is the call, and not how the tokenizer stands
    name = "batch.padding_side" if called else "tokenizer.padding_side"
    if facts.value(name) == "right":
        yield Hit(name, "a decoder goes on from the last position: with padding on the right that is a pad token",
                  "tokenizer.padding_side = 'left'")  # fmt: skip


def _mask(facts: Facts) -> Iterator[Hit]:
    size = facts.value("batch.size")
    guessed = facts.value("batch.mask_origin") == "all ones"
    if facts.value("batch.mask_given") is False and guessed and isinstance(size, int) and size > 1:
        if facts.bare_pads is False:
            return
        sure = "pad tokens were read as text" if facts.bare_pads else "pad tokens, if there are any, are read as text"
        yield Hit("batch.mask_given", f"a batch came without its attention_mask, and none could be guessed: {sure}",
                  "model.generate(**tokenizer(texts, padding=True, return_tensors='pt'))")  # fmt: skip


def _date(facts: Facts) -> Iterator[Hit]:
    if facts.value("chat_template.uses_date") is True:
        yield Hit("chat_template.uses_date", "the template can put the date into the prompt: another prompt each day",
                  "apply_chat_template(..., date_string='26 Jul 2024'), if the template takes one")  # fmt: skip


def _lossy(facts: Facts) -> Iterator[Hit]:
    if facts.setting("assistant_ensemble_weight") is not None:
        yield Hit("generation.assistant_ensemble_weight", "drafted tokens are accepted from a mixture of both models: "
                  "the output is no longer the large model's", "assistant_ensemble_weight=None")  # fmt: skip


def _history(facts: Facts) -> Iterator[Hit]:
    earlier, prompt = facts.value("model.previous_max_cache_length"), facts.value("batch.max_length")
    new, kind = facts.setting("max_new_tokens"), facts.setting("cache_implementation")
    if "static" in str(kind) and all(isinstance(n, int) for n in (earlier, prompt, new)) and earlier > prompt + new:
        yield Hit("model.previous_max_cache_length", f"the static cache has {earlier} places since an earlier, longer "
                  f"call, and {prompt + new} are needed: attention sums over another length",
                  "del model._previous_max_cache_length, or max_cache_len=N at every call")  # fmt: skip


# -- engines and services ---------------------------------------------------------------------------


def _llama_seed(facts: Facts) -> Iterator[Hit]:
    for name in ("seed.llama_cpp", "seed.request"):
        if facts.value(name) == 0:
            yield Hit(name, "llama.cpp takes a seed of 0 for none, and draws another at each start", "seed=1")
            return


def _unseeded(facts: Facts) -> Iterator[Hit]:
    heat = facts.value("vllm.sampling.temperature")
    if isinstance(heat, (int, float)) and heat > 1e-5 and facts.value("vllm.sampling.seed") is None:
        yield Hit("vllm.sampling.seed", "a request without a seed of its own draws from the engine's stream, which all "
                  "requests move", "SamplingParams(seed=N)")  # fmt: skip


def _best_effort(facts: Facts) -> Iterator[Hit]:
    if facts.value("service.request.seed") is not None and facts.runtime in ("openai", "anthropic", "http"):
        yield Hit("service.request.seed", "a service takes a seed as a wish: nothing tells whether it was followed",
                  "compare system_fingerprint, and several answers")  # fmt: skip


def _threshold(facts: Facts) -> Iterator[Hit]:
    for name in ("sglang.speculative_accept_threshold_single", "sglang.speculative_accept_threshold_acc"):
        value = facts.value(name)
        if isinstance(value, (int, float)) and value < 1:
            yield Hit(name, "drafted tokens are accepted below certainty: the output is no longer the large model's",
                      f"--{name.partition('.')[2].replace('_', '-')} 1.0")  # fmt: skip


FREE = "nothing"
UNTRIED = "not shown here: the engine is not installed where the tests run"
RULES: tuple[Rule, ...] = (
    Rule("sampling settings under greedy", "transformers", _ignored, FREE, kind=HARMLESS),
    Rule("acts in greedy", "transformers", _acting, "another output: the setting was doing something"),
    Rule("stops by the clock", "transformers", _clock, "no bound on time"),
    Rule("supplied by the checkpoint", "transformers", _supplied, FREE),
    Rule("top_k that nobody set", "transformers", _top_k, "another output, if 50 was not meant"),
    Rule("drawing at temperature 0", "transformers", _cold, FREE),
    Rule("padding on the right", "transformers", _right, FREE),
    Rule("batch without a mask", "transformers", _mask, FREE),
    Rule("date in the template", "", _date, "the model is told a fixed date", versions="", shown="jinja"),
    Rule("lossy speculation", "transformers", _lossy, "speed: fewer drafted tokens are accepted", versions=">=5.24"),
    Rule("cache sized by an earlier call", "transformers", _history, "the compiler makes its graphs again"),
    Rule("seed 0", "llama_cpp", _llama_seed, FREE, "", UNTRIED),
    Rule("sampling without a seed", "vllm", _unseeded, FREE, "", UNTRIED),
    Rule("a seed that may be ignored", "", _best_effort, "more requests", "", UNTRIED),
    Rule("lossy speculation", "sglang", _threshold, "speed: fewer drafted tokens are accepted", "", UNTRIED),
)  # fmt: skip


def lint(facts: Facts) -> list[Finding]:
    """Return what the rules find, traps first."""
    found = []
    for rule in RULES:
        if rule.runtime not in ("", facts.runtime):
            continue
        for hit in rule.find(facts):
            note = _note(rule, facts.value("lib.transformers.version"))
            found.append(Finding(rule, hit, facts.value(hit.field), facts.source(hit.field), note))
    return sorted(found, key=lambda item: item.rule.kind != TRAP)


def _note(rule: Rule, version: Any) -> str:
    """Say where a rule is carried over to a version in which nobody has shown it."""
    if rule.runtime != "transformers" or not isinstance(version, str) or version.startswith(rule.shown + "."):
        return ""
    known = parts(version) >= parts(rule.versions.removeprefix(">="))
    return f"shown on transformers {rule.shown}; this is {version}" + (
        "" if known else ", which is older than the rule"
    )


def parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    >>> parts("5.24.0.dev0") > parts("5.9")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def of_run(run: Run) -> Facts:
    """Make the facts of a recorded run."""
    item = run.fields.get("generation.pad_token_id")
    pad = item.value if item is not None and item.state is State.VALUE else None
    prompts = [sequence.input_ids for sequence in run.sequences]
    bare = None
    if pad is not None and all(ids is not None for ids in prompts):
        bare = any(ids and pad in (ids[0], ids[-1]) for ids in prompts)
    return Facts(run.fields, run.runtime, bare)


def of_folder(folder: Path, version: str = "") -> Facts:
    """Make the facts of a checkpoint's folder, from its small files, which are read as data.

    Raises BadFile where there is none, or where one is not what it must be.
    """
    if not folder.is_dir():
        raise BadFile(f"there is no folder {folder}; give the folder of a checkpoint.")
    config, settings = _json(folder / "config.json"), _json(folder / "generation_config.json")
    tokenizer = _json(folder / "tokenizer_config.json")
    if config is None and settings is None and tokenizer is None:
        raise BadFile(f"{folder} holds none of config.json, generation_config.json and tokenizer_config.json.")
    values: dict[str, Any] = {
        f"generation.{name}": value for name, value in (settings or {}).items() if name[:1] != "_"
    }
    if config is not None:
        values["model.is_encoder_decoder"] = bool(config.get("is_encoder_decoder", False))
    if tokenizer is not None:
        values["tokenizer.padding_side"] = tokenizer.get("padding_side")
    templates = [str((tokenizer or {}).get("chat_template") or "")]
    templates += [path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.jinja"))]
    templates.append(str((_json(folder / "chat_template.json") or {}).get("chat_template") or ""))
    values["chat_template.uses_date"] = any("strftime_now" in text for text in templates)
    fields = {name: Field(name, value, source="model") for name, value in values.items() if value is not None}
    if version:
        fields["lib.transformers.version"] = Field("lib.transformers.version", version)
    return Facts(fields, "transformers")


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        form = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadFile(f"{path} is not JSON: {error}.") from error
    if not isinstance(form, dict):
        raise BadFile(f"{path} holds a {type(form).__name__} and not a table of settings.")
    return form
