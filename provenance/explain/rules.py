"""Which differences cannot have done it, and the sentence that says why. Only what is certain stands here.

Each rule is a small function from a difference and the pair it stands in to a sentence, or to nothing. What the
catalogue's data says (effect, condition) comes first; what data cannot say follows, each with its reason beside
it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from provenance.catalogue.fields import Spec, spec
from provenance.explain import conditions
from provenance.explain.fields import Difference
from provenance.explain.tokens import Evidence
from provenance.facts import Run, Sequence

DECODING = {"generation", "seeds_rng", "service", "other"}
LENGTHS = {"generation.max_new_tokens", "generation.max_length", "generation.max_time", "generation.stop_strings",
           "generation.stopping_criteria"}  # fmt: skip
IDENTITY = {"model.name_or_path", "model.revision", "weights.files_root", "weights.path", "weights.format",
            "weights.missing_keys", "weights.tied_keys"}  # fmt: skip
# Versions of transformers for which greedy search was seen to ignore the sampling settings (tests/explain/test_rules.py
# runs it on the installed one).
GREEDY_IGNORES_FROM = (4, 39)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sequences of two runs, and what their tokens show."""

    a: Run
    b: Run
    one: Sequence
    other: Sequence
    inputs_equal: bool | None
    evidence: Evidence
    sampled: bool
    differing: frozenset[str] = frozenset()

    @property
    def weights_equal(self) -> bool | None:
        """Say whether both runs had the same tensors in memory; None where that is not known."""
        a, b = (run.fields.get("weights.loaded_root") for run in (self.a, self.b))
        if a is None or b is None or not (a.known and b.known):
            return None
        return a == b


Rule = Callable[[Difference, Spec, Pair], str]


def dismissal(difference: Difference, pair: Pair) -> str:
    """Return why a difference cannot be the cause, or an empty text where it can."""
    declared = spec(difference.name)
    for rule in RULES:
        sentence = rule(difference, declared, pair)
        if sentence:
            return sentence
    return ""


def _context(_: Difference, declared: Spec, __: Pair) -> str:
    return "it is context and never acts on an output" if declared.effect == "none" else ""


def _greedy(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Say it with the version, because it is the version's doing."""
    words = declared.active_when.replace("&", "|").split("|")
    if declared.group != "generation" or "sample" not in words or pair.sampled:
        return ""
    if not conditions.moot(declared.active_when, pair.a, pair.b):
        return ""
    found = conditions.value(pair.a.fields, "lib.transformers.version")
    version = str(found or "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < GREEDY_IGNORES_FROM:
        return ""
    short = difference.name.partition(".")[2]
    return f"greedy decoding reads no {short} in transformers {version.rpartition('.')[0] or version}"


def _moot(_: Difference, declared: Spec, pair: Pair) -> str:
    if declared.group == "generation" and "sample" in declared.active_when:
        return ""  # the version decides, above
    if conditions.moot(declared.active_when, pair.a, pair.b):
        return conditions.why_moot(declared.active_when, pair.a, pair.b)
    return ""


def _same_tensors(difference: Difference, _: Spec, pair: Pair) -> str:
    if difference.name in IDENTITY and pair.weights_equal:
        return "the tensors in memory are equal, whatever they were called and wherever they came from"
    return ""


def _same_ids(difference: Difference, declared: Spec, pair: Pair) -> str:
    before = declared.group == "tokenizer" or difference.name.startswith(("chat_template.", "input."))
    if before and pair.inputs_equal and pair.evidence.ids_equal is False:
        return "both runs fed the same token ids to the model"
    return ""


def _length(difference: Difference, _: Spec, pair: Pair) -> str:
    if difference.name in LENGTHS and pair.evidence.divergent_at is not None and not pair.evidence.prefix:
        return "it can only end an output, and these part before either ended"
    return ""


def _same_logits(_: Difference, declared: Spec, pair: Pair) -> str:
    """Equal bits at every step mean that everything that makes logits was equal in effect."""
    if pair.evidence.kind == "zero" and declared.group not in DECODING:
        return "the logits were equal to the last bit up to the token where the outputs part"
    return ""


def _no_draw(difference: Difference, declared: Spec, pair: Pair) -> str:
    drew = [conditions.value(run.fields, "rng.consumed") for run in (pair.a, pair.b)]
    if declared.effect == "random" and not pair.sampled and drew == [False, False]:
        return "neither run drew a random number"
    del difference
    return ""


def _one_drew(difference: Difference, declared: Spec, pair: Pair) -> str:
    """Where one run drew its tokens and the other did not, that is the difference, and not where its stream stood."""
    if declared.effect == "random" and "generation.do_sample" in pair.differing:
        return "only one of the two runs drew its tokens"
    del difference
    return ""


def _parents(difference: Difference, _: Spec, pair: Pair) -> str:
    """Dismiss digests over many fields: they say nothing that their members do not say."""
    if difference.name == "lib.all_digest":
        return "every package that can matter is compared by its own version"
    if difference.name == "generation.logits_processors" and any(
        name.startswith("generation.") and name not in ("generation.logits_processors", *LENGTHS)
        for name in pair.differing
    ):
        return "the list follows from the settings, which are compared one by one"
    if difference.name == "model.config_digest" and pair.evidence.kind == "rounding" and pair.weights_equal:
        return "another configuration over equal tensors would have moved the logits further"
    return ""


RULES: tuple[Rule, ...] = (
    _context, _greedy, _moot, _same_tensors, _same_ids, _length, _same_logits, _no_draw,
    _one_drew, _parents,
)  # fmt: skip
