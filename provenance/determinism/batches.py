"""Fixed shapes: a prompt meets batches of one size and one padded length, whether it comes alone or in company.

Kernels are chosen by shape, and another kernel sums in another order: so a prompt can get another answer in a batch
than alone. Where every call has the same shape, that cause is gone. What is left (a kernel that treats rows unequally,
experts with a capacity, quantisation over the whole batch) is not promised away: ``measure`` counts on this machine,
with this model and these prompts, how many answers still hang on company, and what the padding costs.

    shapes = Shapes(rows=8, lengths=(64, 256, 1024), pad=tokenizer.pad_token_id)
    answers = generate(model, prompts, shapes, max_new_tokens=64)
    print(measure(model, prompts, shapes, max_new_tokens=64))

Greedy decoding only: drawn tokens come from one stream for all rows, which no shape divides.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from provenance.errors import BadSetting, MissingExtra

Ids = Sequence[int]


class Batch(NamedTuple):
    """One call: ids and mask by row, and which prompt each row answers; a filler row answers none."""

    ids: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]
    prompts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that calls are brought to: rows a batch, the padded lengths, the pad token and its side.

    Every row keeps ``spare`` pad tokens at least. A batch without any is computed without a mask, by another kernel: a
    prompt as long as the shape would have one answer alone, and another beside a shorter one.
    """

    rows: int
    lengths: tuple[int, ...]
    pad: int
    side: str = "left"
    spare: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1 or not self.lengths or min(self.lengths) < 1 or self.spare < 0:
            raise BadSetting(f"{self.rows} rows and lengths {self.lengths} make no shape; both must be 1 or more.")
        if self.side not in {"left", "right"}:
            raise BadSetting(f"the padding side is {self.side!r}; it can be 'left', for decoders, or 'right'.")

    def length(self, size: int) -> int:
        """Return the padded length for a prompt of a size.

        >>> Shapes(4, (64, 16), 0).length(17), Shapes(4, (64, 16), 0).length(16)
        (64, 64)

        Raises BadSetting for a prompt that fits none.
        """
        fitting = [length for length in self.lengths if length >= size + self.spare]
        if not fitting:
            raise BadSetting(
                f"a prompt has {size} tokens, and the longest shape {max(self.lengths)}, of which {self.spare} is for "
                "padding; add a length."
            )
        return min(fitting)

    def batches(self, prompts: Sequence[Ids]) -> Iterator[Batch]:
        """Sort prompts into full batches of one shape each. Missing rows are filled with copies of the batch's first.

        A copy ends when its prompt does, so it makes no call longer.

        >>> [(batch.ids, batch.prompts) for batch in Shapes(2, (3,), pad=0).batches([[5, 6]])]
        [(((0, 5, 6), (0, 5, 6)), (0,))]
        """
        groups: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise BadSetting(f"prompt {index} is empty; a row needs one token at least.")
            groups.setdefault(self.length(len(prompt)), []).append(index)
        for length, members in sorted(groups.items()):
            for start in range(0, len(members), self.rows):
                chosen = members[start : start + self.rows]
                rows = [prompts[index] for index in chosen]
                rows += [rows[0]] * (self.rows - len(rows))
                yield Batch(
                    tuple(self._padded(row, length, self.pad) for row in rows),
                    tuple(self._padded([1] * len(row), length, 0) for row in rows),
                    tuple(chosen),
                )

    def _padded(self, row: Ids, length: int, filler: int) -> tuple[int, ...]:
        more = [filler] * (length - len(row))
        return tuple([*more, *row] if self.side == "left" else [*row, *more])


def generate(model: Any, prompts: Sequence[Ids], shapes: Shapes, **settings: Any) -> list[list[int]]:
    """Generate greedily for prompts of token ids in fixed shapes, and return each one's new ids up to its end token.

    ``settings`` go to ``model.generate``. Raises BadSetting for sampling, or a prompt longer than every shape.
    """
    _greedy(settings)
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in shapes.batches(prompts):
        found = _call(model, batch.ids, batch.mask, settings)
        for index, row in zip(batch.prompts, found, strict=False):
            answers[index] = row
    return answers


@dataclass(frozen=True, slots=True)
class Measured:
    """How many answers hang on company, with fixed shapes and without, and the seconds that each way took."""

    prompts: int
    differ: int
    differ_plain: int
    shapes: Shapes
    device: str
    seconds: dict[str, float]

    @property
    def cost(self) -> dict[str, float]:
        """Return what fixed shapes cost, as a ratio of time, for prompts alone and in full batches."""
        took = self.seconds
        return {"alone": took["fixed alone"] / took["plain alone"],
                "company": took["fixed company"] / took["plain company"]}  # fmt: skip

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.shapes.lengths))
        cost = self.cost
        return (
            f"{self.differ} of {self.prompts} prompts are answered otherwise in company than alone with fixed shapes "
            f"({self.shapes.rows} rows; padded to {lengths}), {self.differ_plain} without.\n"
            f"Time: {cost['alone']:.1f} times that of a prompt alone, {cost['company']:.1f} times that of "
            "full batches.\n"
            f"Counted on this machine ({self.device}), with this model and these prompts; elsewhere count again."
        )


def measure(model: Any, prompts: Sequence[Ids], shapes: Shapes, **settings: Any) -> Measured:
    """Ask every prompt alone, in company, and in company in reverse order, and count those with more than one answer.

    The same is done without fixed shapes: alone without padding, and in batches padded to their longest prompt.
    """
    _greedy(settings)
    took: dict[str, float] = {}
    fixed: list[list[list[int]]] = []
    plain: list[list[list[int]]] = []
    for act in (generate, _plain):  # the first call of a shape is slower
        act(model, prompts[:1], shapes, **settings)
    for way, order in (("alone", None), ("company", 1), ("reversed", -1)):
        for name, answers, act in (("fixed", fixed, generate), ("plain", plain, _plain)):
            begin = time.perf_counter()
            if order is None:
                answers.append([act(model, [prompt], shapes, **settings)[0] for prompt in prompts])
            else:
                answers.append(act(model, prompts[::order], shapes, **settings)[::order])
            took[f"{name} {way}"] = time.perf_counter() - begin
    return Measured(
        len(prompts), _differing(fixed), _differing(plain), shapes, str(getattr(model, "device", "unknown")), took
    )


def _differing(answers: list[list[list[int]]]) -> int:
    return sum(any(other != first for other in others) for first, *others in zip(*answers, strict=True))


def _plain(model: Any, prompts: Sequence[Ids], shapes: Shapes, **settings: Any) -> list[list[int]]:
    """Generate as usual: batches in the order given, padded to their longest prompt, without filler rows."""
    answers: list[list[int]] = []
    for start in range(0, len(prompts), shapes.rows):
        rows = prompts[start : start + shapes.rows]
        own = Shapes(len(rows), (max(map(len, rows)),), shapes.pad, shapes.side, 0)
        (batch,) = own.batches(rows)
        answers += _call(model, batch.ids, batch.mask, settings)
    return answers


def _greedy(settings: dict[str, Any]) -> None:
    if settings.get("do_sample") or settings.get("num_return_sequences", 1) != 1:
        raise BadSetting("fixed shapes steady greedy decoding only: rows that are drawn share one random stream.")


def _call(model: Any, ids: Any, mask: Any, settings: dict[str, Any]) -> list[list[int]]:
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "generating in fixed shapes", "transformers") from None
    tokens = torch.tensor(ids, device=model.device)
    wanted = {"do_sample": False, "pad_token_id": getattr(model.generation_config, "pad_token_id", None), **settings}
    found = model.generate(tokens, attention_mask=torch.tensor(mask, device=model.device), **wanted)
    found = getattr(found, "sequences", found)
    skip = 0 if getattr(model.config, "is_encoder_decoder", False) else tokens.shape[1]
    ends = wanted.get("eos_token_id", model.generation_config.eos_token_id)
    return [_until(row, ends) for row in found[:, skip:].tolist()]


def _until(row: list[int], ends: Any) -> list[int]:
    """Cut a row behind its first end token: what follows is padding, as long as the slowest row."""
    stops = set(ends) if isinstance(ends, (list, tuple)) else {ends}
    at = next((n for n, token in enumerate(row) if token in stops), len(row))
    return row[: at + 1]
