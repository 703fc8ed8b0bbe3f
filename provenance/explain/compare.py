"""The answer to "why did these two runs part": one document, which every face shows in its own way.

Its form is a contract (``docs/diff.md``). Sequences are paired by equal input; each pair is judged; the top
level shows the pair that parts first.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from provenance.catalogue.fields import spec
from provenance.errors import AmbiguousRows
from provenance.explain import advice as advising
from provenance.explain import calls, causes, conditions, fields, own, tokens
from provenance.explain.natures import FUNCTIONAL, nature
from provenance.explain.rules import TENSORS, Pair
from provenance.facts import Run, Sequence
from provenance.integrity.secrets import ARGUMENTS

SCHEMA = "provenance/diff/1"
SAME, NEAR_TIE, DIVERGENT, NOT_COMPARABLE, INCONCLUSIVE = (
    "same",
    "near_tie",
    "divergent",
    "not_comparable",
    "inconclusive",
)
EXIT = {SAME: 0, NEAR_TIE: 1, DIVERGENT: 1, NOT_COMPARABLE: 1, INCONCLUSIVE: 3}
Place = tuple[int, int | None] | None
Named = Callable[[str], bool]


def compare(
    a: Run,
    b: Run,
    a_place: Place = None,
    b_place: Place = None,
    declared: Named = lambda _: False,
    history: causes.History | None = None,
) -> dict[str, Any]:
    """Explain two runs, or two sequences of them; ``history`` is what other pairs of the past say of each field.

    A place is a row and a return index (None for any). ``declared`` says which fields were meant to differ: they
    are listed, and accused of nothing. Raises AmbiguousRows where sequences cannot be paired.
    """
    pairs = [_judge(a, b, one, other, declared, history) for one, other in pair(a, b, a_place, b_place)]
    order = {NOT_COMPARABLE: 0, DIVERGENT: 0, NEAR_TIE: 0, INCONCLUSIVE: 0, SAME: 1}
    pairs.sort(key=lambda item: (order[item["verdict"]], parting(item)))
    first = dict(pairs[0])
    short = ("a", "b", "verdict", "layer", "explained")
    first["pairs"] = [
        {key: item[key] for key in short}
        | {
            "first_divergent_token": item["outputs"]["first_divergent_token"],
            "causes": [cause["field"] for cause in item["causes"]],
            "deciding": own.deciding(item["causes"]),
        }
        for item in pairs
    ]
    past = None
    if history:
        named = [item["field"] for item in first["causes"] if item["field"] in history]
        past = {name: history[name].counts._asdict() for name in named}
    return {"schema": SCHEMA, **first, "history": past, "runs": [], "groups": []}


def parting(item: dict[str, Any]) -> int:
    """Return where a pair parts, to sort by; those that do not come last."""
    at = item["outputs"]["first_divergent_token"]
    return at if at is not None else 1 << 30


# -- pairing ----------------------------------------------------------------------------------------


def pair(a: Run, b: Run, a_place: Place = None, b_place: Place = None) -> list[tuple[Sequence, Sequence]]:
    """Pair the sequences of two runs: those named, else by equal input and then by return index."""
    ones, others = _chosen(a, a_place), _chosen(b, b_place)
    if len(ones) == 1 and len(others) == 1:
        return [(ones[0], others[0])]
    by_input: dict[object, tuple[list[Sequence], list[Sequence]]] = defaultdict(lambda: ([], []))
    keyed = a.key_id == b.key_id
    for side, group in ((0, ones), (1, others)):
        for sequence in group:
            by_input[_input(sequence, keyed)][side].append(sequence)
    found = []
    for left, right in by_input.values():
        if left and right:
            if len(left) != len(right):
                raise _ambiguous(a, b, left, right)
            found += list(zip(left, right, strict=True))
    if found:
        return found
    if len(ones) == len(others):
        return list(zip(ones, others, strict=True))
    raise AmbiguousRows(
        f"the runs hold {len(ones)} and {len(others)} sequences and no prompt in common; say which to compare, as in "
        f"{a.run_id[:13]}:{ones[0].row} {b.run_id[:13]}:{others[0].row}."
    )


def _input(sequence: Sequence, keyed: bool) -> object:
    if sequence.input_ids is not None and not keyed:
        return sequence.input_ids
    return sequence.input_key or sequence.input_ids or (sequence.row, "no input was kept")


def _chosen(run: Run, place: Place) -> list[Sequence]:
    if not run.sequences:
        raise AmbiguousRows(f"run {run.run_id} holds no sequence to compare.")
    if place is None:
        return list(run.sequences)
    row, ret = place
    found = [s for s in run.sequences if s.row == row and (ret is None or s.ret == ret)]
    if not found:
        rows = sorted({s.row for s in run.sequences})
        raise AmbiguousRows(f"run {run.run_id[:13]} has no row {row}; it has rows {rows[0]} to {rows[-1]}.")
    return found


def _ambiguous(a: Run, b: Run, left: list[Sequence], right: list[Sequence]) -> AmbiguousRows:
    many, run = (right, b) if len(right) > len(left) else (left, a)
    several = any(s.ret for s in many)
    named = [f"{s.row}.{s.ret}" if several else str(s.row) for s in many]
    names = ", ".join(named[:6])
    few = min(len(left), len(right))
    return AmbiguousRows(
        f"run {run.run_id[:13]} holds one prompt {len(many)} times (rows {names}) and the other {few} times; "
        f"say which to compare, as in {run.run_id[:13]}:{named[0]}."
    )


# -- judging ----------------------------------------------------------------------------------------


def _judge(
    a: Run, b: Run, one: Sequence, other: Sequence, declared: Named, history: causes.History | None
) -> dict[str, Any]:
    inputs = _inputs(a, b, one, other)
    sampled = conditions.drew(a) or conditions.drew(b)
    evidence = tokens.compare(one, other, sampled, one_key=a.key_id == b.key_id)
    differing, blind = fields.compare(fields.of_sequence(a, one), fields.of_sequence(b, other))
    names = frozenset(item.name for item in differing)
    meant = [item for item in differing if declared(item.name)]
    differing = [item for item in differing if not declared(item.name)]
    blind = [item for item in blind if not declared(item.name)]
    case = Pair(a, b, one, other, inputs["equal"], evidence, sampled, names)
    ranking = causes.rank(differing, blind, case, history)
    ranking.causes = [item for item in ranking.causes if not declared(item["field"])]
    parts = evidence.ids_equal is False or evidence.text_equal is False
    if not parts:
        told = evidence.ids_equal is not None or evidence.text_equal is not None
        why = "the outputs are equal" if told else "it is not known whether the outputs differ"
        calm = ranking.causes + ranking.dismissed
        ranking.dismissed = [{"field": i["field"], "a": i["a"], "b": i["b"], "because": why} for i in calm]
        ranking.causes = []
        if not told:  # what an output would have shown, no field of the call makes up for
            ranking.unknown = [item | {"would_decide": False} for item in ranking.unknown]
    excuse = _excuse(meant, blind, case, declared, history) if parts and not ranking.blamed else []
    if excuse:
        ranking.undecided = False
    verdict = _verdict(case, ranking, parts, excused=bool(excuse))
    explained = bool(ranking.blamed or excuse) or verdict == SAME
    return {
        "a": {"run": a.run_id, "prompt": one.row, "return": one.ret},
        "b": {"run": b.run_id, "prompt": other.row, "return": other.ret},
        "layer": _layer(case, parts), "explained": explained, "verdict": verdict, "inputs": inputs,
        "outputs": _outputs(case), "causes": ranking.causes, "dismissed": ranking.dismissed,
        "unknown": ranking.unknown, "declared": _meant(meant, excuse),
        "endings": {
            "a": a.status, "b": b.status, "told": case.endings.told(), "decides": _open(case, verdict, parts),
        },
        "advice": advising.excused(excuse) if excuse else _advice(case, ranking, verdict, parts),
    }  # fmt: skip


def _excuse(
    meant: list[fields.Difference],
    blind: list[fields.Blind],
    case: Pair,
    declared: Named,
    history: causes.History | None,
) -> list[dict[str, Any]]:
    """Return the declared differences that account for it, where nothing that was not recorded would do better."""
    found = causes.rank(meant, blind, case, history)
    return [] if found.undecided else [item for item in found.blamed if declared(item["field"])]


def _meant(meant: list[fields.Difference], excuse: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List what was declared, with those that account for the difference marked; the input itself is no field."""
    listed = [{"field": item.name, "a": fields.document(item.a), "b": fields.document(item.b)} for item in meant]
    names = {item["field"] for item in listed}
    listed += [{key: item[key] for key in ("field", "a", "b")} for item in excuse if item["field"] not in names]
    explains = {item["field"] for item in excuse}
    return [item | ({"explains": True} if item["field"] in explains else {}) for item in listed]


def _inputs(a: Run, b: Run, one: Sequence, other: Sequence) -> dict[str, Any]:
    if one.input_ids is not None and other.input_ids is not None:
        equal: bool | None = one.input_ids == other.input_ids
    elif one.input_key and other.input_key and a.key_id == b.key_id:
        equal = one.input_key == other.input_key
        empty = [conditions.value(run.fields, "input.empty") for run in (a, b)]
        if not equal and True in empty and empty != [True, True]:
            equal = None  # embeddings against ids: keys over two kinds of things
        if not equal and _hidden(a, one) != _hidden(b, other):
            equal = None  # a mask with holes is part of what the keys are made of
    else:
        equal = _texts(one, other)
        if equal and (one.input_ids is not None or other.input_ids is not None):
            equal = None  # one text can be many rows of ids
    if calls.is_function(a, b):
        withheld = ARGUMENTS in a.fields or ARGUMENTS in b.fields
        return _arguments(one, other, equal, withheld)
    first = None
    if equal is False and one.input_ids is not None and other.input_ids is not None:
        at, left, right = tokens.parts(one.input_ids, other.input_ids)
        first = {"token": at, "a": left, "b": right}
    return {"equal": equal, "first_difference": first, "texts_equal": _texts(one, other)}


def _arguments(one: Sequence, other: Sequence, equal: bool | None, withheld: bool) -> dict[str, Any]:
    """Compare what two functions were called with: where no key tells, the values, if nothing was taken out of them."""
    parted = [] if withheld else calls.parted(one, other)
    kept = one.input_value is not None and other.input_value is not None
    if equal is None and kept and not withheld:
        equal = not parted
    if equal and calls.opaque(one, other):
        equal = None  # two objects of one type, which may hold anything
    first = parted[0]._asdict() if parted and equal is False else None
    return {"equal": equal, "first_difference": first, "texts_equal": None, "kind": "arguments"}


def _hidden(run: Run, sequence: Sequence) -> object:
    return conditions.value(fields.of_sequence(run, sequence), fields.HOLES)


def _texts(one: Sequence, other: Sequence) -> bool | None:
    return None if one.input_text is None or other.input_text is None else one.input_text == other.input_text


def _verdict(case: Pair, ranking: causes.Ranking, parts: bool, excused: bool = False) -> str:
    if not parts:
        untold = case.evidence.ids_equal is None and case.evidence.text_equal is None
        return INCONCLUSIVE if untold or case.endings.differ else SAME
    if not ranking.blamed and not excused and _cut(case):
        return INCONCLUSIVE
    if case.inputs_equal is False:
        return INCONCLUSIVE if ranking.undecided else NOT_COMPARABLE
    if ranking.undecided:
        return INCONCLUSIVE
    blamed = ranking.blamed
    # Other tensors are another model, however little they moved the logits; a cast of equal ones is none.
    if any(item["field"] in TENSORS for item in blamed):
        return NOT_COMPARABLE
    # A near tie is a verdict on the choice, and on its cause: where another function is to blame it is none.
    # Logits that moved where nothing differs that could move them are the work of something unseen.
    unseen = not blamed and not excused and case.repeats and case.evidence.kind == "rounding"
    if case.evidence.near_tie and not unseen and not _functional(blamed):
        return NEAR_TIE
    other = case.weights_equal is False and not case.beneath
    if other and (not blamed or case.evidence.kind in ("large", "unknown")):
        return NOT_COMPARABLE
    return DIVERGENT


def _cut(case: Pair) -> bool:
    """Say whether the outputs are equal up to where a call ended that did not end well."""
    lengths = [len(item.output_ids or ()) for item in (case.one, case.other)]
    return case.evidence.prefix and case.endings.failed("a" if lengths[0] < lengths[1] else "b")


def _open(case: Pair, verdict: str, parts: bool) -> bool:
    """Say whether it could not be told because a call did not end well."""
    return verdict == INCONCLUSIVE and bool(case.endings.told()) and (not parts or _cut(case))


def _functional(found: list[dict[str, Any]]) -> bool:
    """Say whether more than another order of sums may be to blame: then the output that came of it may be wrong.

    Any cause that stands will do: another function can move logits by as little as rounding does.
    """
    first = bool(found) and found[0]["effect"] == "semantic"
    return first or any(nature(spec(item["field"])) in FUNCTIONAL for item in found)


def _layer(case: Pair, parts: bool) -> str | None:
    """Name the first layer at which the two runs part: nothing below it can be the cause."""
    if not parts:
        return None
    evidence = case.evidence
    if case.function:  # it has no layers: what was handed in, or what it did with it
        return "prompt" if case.inputs_equal is False else None
    if case.inputs_equal is False:
        texts = case.one.input_text, case.other.input_text
        if None in texts:
            return "ids"
        return "tokenizer" if texts[0] == texts[1] else "prompt"
    if evidence.ids_equal:
        return "text"
    if case.weights_equal is False and evidence.kind != "zero":
        return "weights"
    if evidence.prefix:
        return "stop"
    if evidence.kind == "zero":
        return "sampler" if case.sampled else "settings"
    return "prefill" if evidence.divergent_at == 0 else "decode"


def _outputs(case: Pair) -> dict[str, Any]:
    evidence = case.evidence
    change = evidence.change
    found: dict[str, Any] = {
        "equal": evidence.ids_equal if evidence.ids_equal is not None else evidence.text_equal,
        "surface_only": evidence.surface_only, "first_divergent_token": evidence.divergent_at,
        "prefix": evidence.prefix,
        "a": tokens.side(case.one, evidence.divergent_at, conditions.drew(case.a)),
        "b": tokens.side(case.other, evidence.divergent_at, conditions.drew(case.b)),
        "logit_change": None,
    }  # fmt: skip
    if change is not None:
        found["logit_change"] = {
            "max_abs": change.max_abs, "ulps": round(change.ulps, 3), "over_tokens": change.over_tokens,
            "rounding_allows": change.allowed, "kind": evidence.kind, "at_least": change.at_least,
        }  # fmt: skip
    elif case.function:
        found["no_evidence"] = "a function has arguments and a result, and no tokens"
    elif evidence.why_unknown:
        found["no_evidence"] = evidence.why_unknown
    return found


def _advice(case: Pair, ranking: causes.Ranking, verdict: str, parts: bool) -> list[str]:
    """Say what to do next. Only what exists is named."""
    if _open(case, verdict, parts):
        return advising.failed(case.endings)
    if not parts:
        return advising.calm(case.a.run_id) if verdict == SAME else advising.blank()
    advice = advising.tie(case, ranking.blamed) if verdict == NEAR_TIE else []
    if not ranking.blamed:
        advice.append(advising.unexplained(case, ranking.unknown))
        advice += advising.own(own.vague(ranking.causes), case.b.run_id, case.again)
    elif case.function and ranking.blamed[0]["field"] == ARGUMENTS:
        advice += advising.arguments(calls.parted(case.one, case.other), case.b.run_id)
    else:
        advice += advising.steps(ranking.blamed[0], case.b.run_id, case.again)
    if verdict == INCONCLUSIVE:
        advice.append("Record both runs with that field known, then compare again.")
    return advice
