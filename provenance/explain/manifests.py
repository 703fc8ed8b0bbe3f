"""Two manifests of weights side by side: which tensors differ, how, and which only one of the two holds."""

from dataclasses import dataclass

from provenance.facts import WeightEntry, WeightsManifest

Pair = tuple[WeightEntry, WeightEntry]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs between two manifests, by name. ``spared`` names what memory holds beside what files do."""

    shared: int
    differing: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    spared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Say whether nothing differs."""
        return not (self.differing or self.only_a or self.only_b)

    @property
    def dtypes(self) -> tuple[Pair, ...]:
        """Return the pairs of another type."""
        return tuple(pair for pair in self.differing if pair[0].dtype != pair[1].dtype)

    @property
    def shapes(self) -> tuple[Pair, ...]:
        """Return the pairs of another shape."""
        return tuple(pair for pair in self.differing if pair[0].shape != pair[1].shape)


def incomparable(a: WeightsManifest, b: WeightsManifest) -> str:
    """Return why two manifests have nothing to compare, or an empty text.

    >>> whole = WeightsManifest("files", (WeightEntry("file", "x.gguf", "", (), 1, "00"),))
    >>> incomparable(whole, whole)
    ''
    """
    a_files, b_files = (all(entry.kind == "file" for entry in side.entries) for side in (a, b))
    if a_files == b_files:
        return ""
    side, other = ("A", "B") if a_files else ("B", "A")
    return f"{side} is known by whole files alone and {other} by tensors"


def compare(a: WeightsManifest, b: WeightsManifest) -> Comparison:
    """Compare by name. From files, a buffer that none holds and a second name of a tied tensor are no difference."""
    ours, theirs = ({entry.name: entry for entry in side.entries} for side in (a, b))
    both = sorted(ours.keys() & theirs.keys())
    differing = tuple((ours[name], theirs[name]) for name in both if _content(ours[name]) != _content(theirs[name]))
    only_a, only_b = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    spared: list[str] = []
    if {a.kind, b.kind} == {"tensors", "checkpoint"}:
        memory, alone = (ours, only_a) if a.kind == "tensors" else (theirs, only_b)
        held = {_content(memory[name]) for name in both}
        spared = [
            name for name in alone if memory[name].kind in ("buffer", "attribute") or _content(memory[name]) in held
        ]
        only_a, only_b = ([name for name in side if name not in set(spared)] for side in (only_a, only_b))
    return Comparison(len(both), differing, tuple(only_a), tuple(only_b), tuple(spared))


def _content(entry: WeightEntry) -> tuple[object, ...]:
    return entry.dtype, entry.shape, entry.sha256


def sentence(found: Comparison, what: str = "tensors", limit: int = 6) -> str:
    """Say it in one line.

    >>> sentence(Comparison(291, (), (), ("lm_head.weight",)))
    '291 tensors are the same; 1 only in B: lm_head.weight'
    """
    if found.differing:
        shown = _names([one.name for one, _ in found.differing], limit)
        parts = [f"{len(found.differing)} of {found.shared} {what} differ: {shown}"]
    else:
        parts = [f"{found.shared} {what} are the same"]
    if found.dtypes:
        parts.append(f"{len(found.dtypes)} changed dtype")
    if found.shapes:
        parts.append(f"{len(found.shapes)} changed shape")
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            parts.append(f"{len(names)} only in {side}: {_names(names, limit)}")
    return "; ".join(parts)


def _names(names: tuple[str, ...] | list[str], limit: int) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
