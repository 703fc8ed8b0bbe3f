"""Many runs of one prompt: which of them agree, and which field separates those that do from those that do not.

Runs with equal outputs are a group. A field *separates* the groups if its values part the runs exactly as the
outputs do; it is told first, and ties are told. A field that varies within a group decided nothing there and is
dismissed, unless no field separates exactly: then one whose every value gave a single output is still possible. Two
runs of different groups are compared in full beneath it, so that no field is named that the tokens rule out.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from itertools import combinations
from typing import Any

from provenance.catalogue.fields import spec
from provenance.errors import AmbiguousRows
from provenance.explain import advice, fields, own
from provenance.explain.compare import Named, Place, compare, parting
from provenance.facts import Field, Run, Sequence

Member = tuple[Run, Sequence]
INPUT = "input.token_ids"
JOINED_AT_MOST = 40  # fields of which pairs are tried
PARTS_TOLD = 5


def compare_all(given: Many[tuple[Run, Place]], declared: Named = lambda _: False) -> dict[str, Any]:
    """Explain two or more runs: the answer to the two that part first, with the groups and what separates them.

    Raises AmbiguousRows where the runs hold no prompt in common and no row is named.
    """
    members = _members(given)
    labels = _labels(members)
    firsts = [labels.index(number) for number in range(1, max(labels, default=0) + 1)]
    firsts += [n for n, label in enumerate(labels) if label == 0]
    answers = [_pair(members[firsts[0]], members[n], declared) for n in firsts[1:]]
    if not answers:  # one group: the answer is that of any two
        answers = [_pair(members[0], members[-1], declared)]
    tables = [_table(members, member) for member in members]
    split = _split(tables, labels, answers, declared)
    for answer in answers:
        _heed(answer, split)
    chosen = min((item for item in answers if item["verdict"] != "same"), key=parting, default=answers[0])
    shown = {name for name in _names(tables) if _differs([table.get(name) for table in tables])}
    rows = zip(members, labels, tables, strict=True)
    return chosen | {
        "pairs": [item["pairs"][0] for item in answers],
        "runs": [_line(*member, label, table, shown) for member, label, table in rows],
        "groups": _groups(members, labels, answers),
        "split": split,
        "advice": _advice(chosen, split),
    }  # fmt: skip


# -- which sequences, and which of them agree -------------------------------------------------------


def _members(given: Many[tuple[Run, Place]]) -> list[Member]:
    """Choose one sequence of each run: the one named, the only one, or that of a prompt that all of them hold."""
    keyed = len({run.key_id for run, _ in given}) == 1
    fixed = [_fixed(run, place) for run, place in given]
    held = next((item for item in fixed if item is not None), None)
    wanted = [_input(item, keyed) for item in ([held] if held is not None else given[0][0].sequences)]
    best: list[Member] = []
    for prompt in dict.fromkeys(wanted):
        found = [_holding(run, one, prompt, keyed) for (run, _), one in zip(given, fixed, strict=True)]
        members = [(run, one) for (run, _), one in zip(given, found, strict=True) if one is not None]
        if len(members) == len(given) and (not best or max(_labels(members)) > max(_labels(best))):
            best = members
    if not best:
        raise AmbiguousRows(
            f"the {len(given)} runs hold no prompt in common; say which to compare, as in {given[0][0].run_id[:13]}:0."
        )
    return best


def _fixed(run: Run, place: Place) -> Sequence | None:
    if not run.sequences:
        raise AmbiguousRows(f"run {run.run_id} holds no sequence to compare.")
    if place is None:
        return run.sequences[0] if len(run.sequences) == 1 else None
    found = next((s for s in run.sequences if s.row == place[0] and place[1] in (None, s.ret)), None)
    if found is None:
        raise AmbiguousRows(f"run {run.run_id[:13]} has no row {place[0]}.")
    return found


def _input(sequence: Sequence, keyed: bool) -> object:
    return (sequence.input_key if keyed else "") or sequence.input_ids or f"row {sequence.row}"


def _holding(run: Run, fixed: Sequence | None, prompt: object, keyed: bool) -> Sequence | None:
    return fixed or next((item for item in run.sequences if _input(item, keyed) == prompt), None)


def _labels(members: Many[Member]) -> list[int]:
    """Give each run the number of its group of equal output, in their order; 0: it cannot be compared."""
    seen: dict[object, int] = {}
    return [0 if key is None else seen.setdefault(key, len(seen) + 1) for key in _outputs(members)]


def _outputs(members: Many[Member]) -> list[object]:
    """Return what tells outputs apart: ids, or keys under one key, or texts, whichever most runs have."""
    keyed = len({run.key_id for run, _ in members}) == 1
    texts: list[object] = [one.output_text for _, one in members]
    ids: list[object] = [one.output_ids for _, one in members]
    keys: list[object] = [one.output_key or None if keyed else None for _, one in members]
    best = max((ids, keys, texts), key=lambda column: sum(item is not None for item in column))
    if best is texts or None in texts:
        return best
    return [None if item is None else (item, text) for item, text in zip(best, texts, strict=True)]


def _pair(one: Member, other: Member, declared: Named) -> dict[str, Any]:
    return compare(one[0], other[0], (one[1].row, one[1].ret), (other[1].row, other[1].ret), declared)


# -- the split --------------------------------------------------------------------------------------


def _table(members: Many[Member], member: Member) -> dict[str, Field]:
    """Return the fields of a member; the prompt stands among them where the runs do not share one."""
    keyed = len({run.key_id for run, _ in members}) == 1
    prompts = list(dict.fromkeys(_input(one, keyed) for _, one in members))
    found = fields.of_sequence(*member)
    if len(prompts) > 1:
        found[INPUT] = Field(INPUT, f"prompt {prompts.index(_input(member[1], keyed)) + 1}")
    return found


def _names(tables: Many[Mapping[str, Field]]) -> list[str]:
    return sorted({name for table in tables for name in table})


def _differs(column: Many[Field | None]) -> bool:
    first = column[0]
    return first is None or not first.known or any(item is None or item != first for item in column[1:])


def _classes(column: Many[Field | None]) -> list[int | None]:
    """Give each distinct value of a column a number; None where it is not known."""
    seen: list[Field] = []
    found: list[int | None] = []
    for item in column:
        if item is None or not item.known:
            found.append(None)
            continue
        if item not in seen:
            seen.append(item)
        found.append(seen.index(item))
    return found


def _split(
    tables: Many[Mapping[str, Field]], labels: Many[int], answers: Many[dict[str, Any]], declared: Named
) -> dict[str, Any]:
    """Sort the differing fields by what they do to the groups."""
    found: dict[str, Any] = {"separates": [], "partly": [], "possible": [], "dismissed": [], "unknown": []}
    ruled = dict(_ruled_out(answers))
    blind = {item["field"] for answer in answers for item in answer["unknown"]}  # those that can matter
    classes: dict[str, list[int | None]] = {}
    if max(labels) > 1:
        for name in _names(tables):
            column = [table.get(name) for table in tables]
            if not declared(name) and _differs(column):
                classes[name] = _classes(column)
                kind, why = _kind(classes[name], labels)
                fits = kind == "separates" and spec(name).effect != "none"
                if name in ruled:
                    found["dismissed"].append({"field": name, "because": ruled[name], "fits": fits})
                elif kind != "unknown" or name in blind:
                    found[kind].append({"field": name, "because": why})
    _set_aside(found, classes)
    if found["separates"]:
        found["dismissed"] += [{"field": item["field"], "because": WITHIN} for item in found["possible"]]
        found["possible"] = []
    found["dismissed"].sort(
        key=lambda item: (not item.get("fits"), spec(item["field"]).effect == "none", item["field"])
    )
    order = _order(answers)
    for kind in ("separates", "partly", "possible"):
        found[kind] = _folded(sorted(found[kind], key=lambda item: order(item["field"])), answers)
        for item in found[kind]:
            item["values"] = _values(tables, labels, item["field"])
            item["effect"] = spec(item["field"]).effect
    found["together"] = [] if found["separates"] else _together([i["field"] for i in found["partly"]], classes, labels)
    found["told"] = _told(found, max(labels), {name for name, column in classes.items() if _unique(column)})
    return found


WITHIN = "it varies within a group of equal outputs"
UNIQUE = "it differs in every run, and so fits whatever the outputs are"


def _unique(column: Many[int | None]) -> bool:
    """Say whether a field is another in every run: that is true of any number of a call, and parts nothing."""
    return len(column) > 2 and None not in column and len(set(column)) == len(column)


def _set_aside(found: dict[str, Any], classes: Mapping[str, list[int | None]]) -> None:
    """Dismiss what differs in every run where something else parts them, but for a known field that fits exactly."""
    alike = {
        kind: [item for item in found[kind] if _unique(classes[item["field"]])
               and (kind == "possible" or own.is_own(item["field"]))] for kind in ("separates", "possible")
    }  # fmt: skip
    if sum(len(found[kind]) for kind in ("separates", "partly", "possible")) == sum(map(len, alike.values())):
        return
    for kind, items in alike.items():
        found[kind] = [item for item in found[kind] if item not in items]
        found["dismissed"] += [{"field": item["field"], "because": UNIQUE} for item in items]


def _kind(values: Many[int | None], labels: Many[int]) -> tuple[str, str]:
    """Say what a field's values do to the groups, and the sentence for it."""
    pairs = {(value, label) for value, label in zip(values, labels, strict=True) if value is not None and label}
    known, groups = len({value for value, _ in pairs}), len({label for _, label in pairs})
    steady, decides = len(pairs) == groups, len(pairs) == known  # one value a group; one group a value
    missing = sum(value is None and label > 0 for value, label in zip(values, labels, strict=True))
    if missing:
        fits = "; it would separate the groups as far as it is known" if steady and decides and groups > 1 else ""
        return "unknown", f"not known in {missing} of {len(values)} runs{fits}"
    if known < 2:
        return "dismissed", "it is the same in every run whose output can be compared"
    if steady and decides:
        return "separates", "its values part the runs exactly as the outputs do"
    if steady:
        return "partly", "it is one value within each group, and parts some of the groups"
    if decides:
        return "possible", f"{WITHIN}, and each of its values gave one output only"
    return "dismissed", WITHIN


def _ruled_out(answers: Many[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Return the fields that no pair of groups accuses, with the reason of the first pair that dismisses them."""
    named = {name for answer in answers for cause in answer["causes"] for name in (cause["field"], *cause["with"])}
    for answer in answers:
        if answer["outputs"]["equal"] is False or answer["causes"]:
            for item in reversed(answer["dismissed"]):
                if item["field"] not in named:
                    yield item["field"], item["because"]


def _order(answers: Many[dict[str, Any]]) -> Any:
    """Order fields by the confidence that the pairs give them, then by how often they are the cause."""
    confidence: dict[str, float] = {}
    for answer in answers:
        for cause in answer["causes"]:
            confidence[cause["field"]] = max(cause["confidence"], confidence.get(cause["field"], 0.0))
    return lambda name: (-confidence.get(name, 0.0), -spec(name).prior, name)


def _folded(items: list[dict[str, Any]], answers: Many[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fold what moved in lockstep with a cause into it, so that one thing is told once."""
    present = {item["field"] for item in items}
    folded: dict[str, str] = {}
    for cause in (cause for answer in answers for cause in answer["causes"]):
        for name in cause["with"]:
            if cause["field"] in present and name in present and name != cause["field"]:
                folded.setdefault(name, cause["field"])
    return [
        item | {"with": sorted(name for name, head in folded.items() if head == item["field"])}
        for item in items
        if item["field"] not in folded
    ]


def _values(tables: Many[Mapping[str, Field]], labels: Many[int], name: str) -> dict[str, list[object]]:
    """Return the values of a field by group."""
    found: dict[str, list[object]] = {}
    for table, label in zip(tables, labels, strict=True):
        if label:
            value = fields.document(table[name])
            column = found.setdefault(str(label), [])
            if value not in column:
                column.append(value)
    return found


def _together(names: Many[str], classes: Mapping[str, list[int | None]], labels: Many[int]) -> list[str]:
    """Return the first two fields that part the groups together, where none does alone."""
    wanted = len({label for label in labels if label})
    for one, other in combinations(names[:JOINED_AT_MOST], 2):
        rows = zip(classes[one], classes[other], labels, strict=True)
        if len({(a, b) for a, b, label in rows if label}) == wanted:
            return [one, other]
    return []


def _told(split: Mapping[str, Any], groups: int, unique: set[str]) -> str:
    """Say in a sentence what separates the groups."""
    names, possible = ([item["field"] for item in split[kind]] for kind in ("separates", "possible"))
    if groups < 2:
        return "All outputs that can be compared are equal."
    if unique.issuperset(names + possible) and all(map(own.is_own, names + possible)) and names + possible:
        verb = "differs" if len(names + possible) == 1 else "differ"
        return f"No recorded field separates the {groups} groups: {_and(names + possible)} {verb} in every run."
    if len(names) == 1:
        return f"{names[0]} separates the {groups} groups exactly{_note(names)}."
    if names:
        return (
            f"{_and(names)} each separate the {groups} groups exactly{_note(names)}. These runs cannot "
            "tell them apart: a run in which only one of them is changed would."
        )
    if split["together"]:
        return f"No field alone separates the {groups} groups; {' and '.join(split['together'])} together do."
    if split["partly"]:
        parts = "; ".join(f"{item['field']} parts {_parted(item['values'])}" for item in split["partly"][:PARTS_TOLD])
        return f"No field alone separates the {groups} groups: {parts}."
    if possible:
        every = ", though it differs in every run" if possible[0] in unique else ""
        return f"No field separates the {groups} groups exactly; {possible[0]} may decide{every}{_note(possible[:1])}."
    ruled = [item for item in split["dismissed"] if item.get("fits")]
    if ruled:
        told = "; ".join(f"{item['field']} would, but {item['because']}" for item in ruled[:3])
        return f"No recorded field that can have done it separates the {groups} groups: {told}."
    return f"No recorded field separates the {groups} groups."


def _and(names: Many[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _note(names: Many[str]) -> str:
    """Say of fields of the caller's own that it is not known what they do."""
    found = [name for name in names if own.is_own(name)]
    return f" (a field of your own, of which it is not known whether it acts: {_and(found)})" if found else ""


def _parted(values: Mapping[str, list[object]]) -> str:
    """Say which groups a field parts from which.

    >>> _parted({"1": [0], "2": [0], "3": [7]}), _parted({"1": [0], "2": [1], "3": [2], "4": [2]})
    ('group 3 from 1 and 2', 'groups 1, 2, and 3 and 4')
    """
    kinds: list[tuple[list[object], list[str]]] = []
    for group, held in values.items():
        same = next((groups for value, groups in kinds if value == held), None)
        if same is None:
            kinds.append((held, [group]))
        else:
            same.append(group)
    sides = sorted((groups for _, groups in kinds), key=len)
    if len(sides) == 2:
        return f"group{'s' * (len(sides[0]) > 1)} {_and(sides[0])} from {_and(sides[1])}"
    return f"groups {', '.join(_and(groups) for groups in sides[:-1])}, and {_and(sides[-1])}"


# -- the answer -------------------------------------------------------------------------------------


def _heed(answer: dict[str, Any], split: Mapping[str, Any]) -> None:
    """Let the groups correct a pair: what they dismiss is no cause, and what separates them comes first."""
    why = {item["field"]: item["because"] for item in split["dismissed"]}
    exact = {item["field"] for item in split["separates"]}
    gone = [cause for cause in answer["causes"] if cause["field"] in why]
    answer["causes"] = sorted(
        (cause for cause in answer["causes"] if cause["field"] not in why),
        key=lambda cause: cause["field"] not in exact,
    )
    answer["dismissed"] += [{"field": c["field"], "a": c["a"], "b": c["b"], "because": why[c["field"]]} for c in gone]
    excused = any(item.get("explains") for item in answer["declared"])
    answer["explained"] = bool(own.blamed(answer["causes"])) or excused or answer["verdict"] == "same"
    answer["pairs"][0] |= {
        "causes": [cause["field"] for cause in answer["causes"]],
        "deciding": own.deciding(answer["causes"]),
        "explained": answer["explained"],
    }


def _line(run: Run, one: Sequence, label: int, table: Mapping[str, Field], shown: set[str]) -> dict[str, Any]:
    values = {name: fields.document(table[name]) if name in table else None for name in sorted(shown)}
    return {"run": run.run_id, "prompt": one.row, "return": one.ret, "name": run.name, "group": label or None,
            "fields": values}  # fmt: skip


def _groups(members: Many[Member], labels: Many[int], answers: Many[dict[str, Any]]) -> list[dict[str, Any]]:
    """Describe each group; the first token at which it parts from group 1 stands with it."""
    found = []
    for number in range(1, max(labels) + 1):
        held = [n for n, label in enumerate(labels) if label == number]
        answer = answers[number - 2] if number > 1 else None
        ids = members[held[0]][1].output_ids
        found.append({
            "group": number, "runs": [members[n][0].run_id for n in held],
            "output_tokens": None if ids is None else len(ids), "verdict": answer["verdict"] if answer else None,
            "first_divergent_token": answer["outputs"]["first_divergent_token"] if answer else None,
        })  # fmt: skip
    return found


def _advice(chosen: dict[str, Any], split: Mapping[str, Any]) -> list[str]:
    """Advise on the field that separates the groups, where it is not the pair's own first cause already."""
    if not split["separates"]:
        return list(chosen["advice"])
    return advice.steps(split["separates"][0], chosen["b"]["run"])
