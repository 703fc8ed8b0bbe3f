"""What a mask of attention says of the rows of a batch: which positions are padding, and which tokens it hides.

Padding stands at the ends of a row, is hidden, and holds a padding token. A token that is hidden anywhere else is part
of the prompt all the same, and the mask that hides it is a difference of its own.
"""

from typing import Any

MOST = 64  # ranges of hidden tokens that are written out for a row


def without_padding(ids: Any, mask: Any, pads: set[int]) -> Any:
    """Return which positions belong to the prompts, as booleans; None where all do.

    Where nobody says what a padding token is, it is the one that all hidden ends hold, if there is one.
    """
    if mask is None:
        return None
    ends = (mask.cumsum(dim=1) == 0) | (mask.flip(1).cumsum(dim=1) == 0).flip(1)
    found = pads or _common(ids[ends].unique().tolist())
    padded = ends.clone()
    for row in (ends & ~_isin(ids, found)).any(dim=1).nonzero().flatten().tolist():
        padded[row] = _edges(ids[row].tolist(), ends[row].tolist(), found, ids)
    return None if not bool(padded.any()) else ~padded


def _isin(ids: Any, found: set[int]) -> Any:
    hit = ids.new_zeros(ids.shape).bool()
    for item in found:
        hit = hit | (ids == item)
    return hit


def _common(values: list[int]) -> set[int]:
    return set(values) if len(values) == 1 else set()


def _edges(row: list[int], ends: list[bool], found: set[int], like: Any) -> Any:
    """Say where one row is padded: from an end inwards, up to the first token that is none of padding."""
    padded = [False] * len(row)
    for order in (range(len(row)), range(len(row) - 1, -1, -1)):
        for at in order:
            if not (ends[at] and row[at] in found):
                break
            padded[at] = True
    return like.new_tensor(padded).bool()


def padding(kept: Any, rows: int, width: int) -> tuple[list[int], str]:
    """Return the length of each prompt and the side on which rows are padded; "" where none is."""
    if kept is None:
        return [width] * rows, ""
    lengths = [int(n) for n in kept.sum(dim=1).tolist()]
    sides = set()
    left, right = (~kept[:, 0]).tolist(), (~kept[:, -1]).tolist()
    for before, after in zip(left, right, strict=True):
        sides |= {"left"} if before else set()
        sides |= {"right"} if after else set()
    return lengths, "+".join(sorted(sides))


def holes(mask: Any, kept: Any) -> list[list[list[int]]]:
    """Return for each row the ranges of its prompt that the mask hides: first and last token. Empty where none does.

    A row with very many ranges has their number in place of the rest.
    """
    if mask is None:
        return []
    hidden = ~mask if kept is None else kept & ~mask
    if not bool(hidden.any()):
        return []
    found = []
    for row in range(int(mask.shape[0])):
        line = (hidden[row] if kept is None else hidden[row][kept[row]]).tolist()
        starts = [at for at, here in enumerate(line) if here and not (at and line[at - 1])]
        stops = [at for at, here in enumerate(line) if here and not (at + 1 < len(line) and line[at + 1])]
        ranges = [list(pair) for pair in zip(starts, stops, strict=True)]
        found.append(ranges if len(ranges) <= MOST else [*ranges[:MOST], [len(ranges)]])
    return found
