"""What each token was chosen from: the top raw logits, the log of their sum, the margin of the processed scores.

The observer is a list of logits processors that looks before and after the others have run. It reads and never
writes; its tensors stay on the device until the call is over, so no token waits for a copy. Greedy search and
sampling have evidence; where it cannot be had, the reason is kept instead (``docs/coverage.md``).

One buffer a sequence (little-endian, ``tests/golden/``):

    version u8 · k u8 · flags u8 · dtype u8 · steps u32
    ids i32 by steps by k · logits f32 by steps by k · log-sum-exp f32 by steps
    with flag 1, where processors changed the scores: ids i32 by steps by 2 · scores f32 by steps by 2
"""

import ctypes
import math
import struct
import sys
from typing import Any, NamedTuple

from provenance.recorder import Harmless

VERSION = 1
PROCESSED = 1
DTYPES = {"float32": 1, "bfloat16": 2, "float16": 3, "float64": 4}
HEAD = struct.Struct("<BBBBI")
FLUSH_STEPS = 256


class Evidence(NamedTuple):
    """The evidence of one sequence: its buffer, the smallest margin and the step where it stands."""

    data: bytes
    margin: float
    margin_at: int


class Observer:
    """Collects evidence during one decoding loop. ``reason`` says why there is none."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.reason = "" if k else "token evidence is off (evidence=0)"
        self.steps = 0
        self.rows = 0
        self.device = ""
        self.config: Any = None  # the resolved generation config of the loop
        self.mode = ""
        self.prompt_length: int | None = None
        self.mask: Any = None
        self.processors: list[str] = []
        self.held: list[Any] = []  # fields of what the caller's own code held when the call began
        self.criteria = False  # the caller's own stopping criteria, which may end one row before the others
        self._parts: dict[str, list[Any]] = {"ids": [], "logits": [], "sums": [], "ids2": [], "scores2": []}
        self._done: dict[str, list[Any]] = {name: [] for name in self._parts}

    def look(self, torch: Any, scores: Any) -> None:
        """See the raw logits of one step: a float tensor (rows, vocabulary)."""
        if self.reason:
            return
        try:
            logits, ids = scores.topk(min(self.k, scores.shape[-1]), dim=-1)
            sums = torch.logsumexp(scores, dim=-1)
        except Exception as error:  # out of memory, or an operator that this mode forbids
            self.reason = f"{type(error).__name__} while the logits were read"
            return
        if not self.steps:
            self.rows, self.device = int(scores.shape[0]), str(scores.device)
        parts = self._parts
        parts["ids"].append(ids)
        parts["logits"].append(logits)
        parts["sums"].append(sums)
        self.steps += 1
        if self.steps % FLUSH_STEPS == 0:
            self._flush(torch)

    def look_again(self, scores: Any) -> None:
        """See the processed scores of the same step: what the choice is made from."""
        if self.reason:
            return
        try:
            values, ids = scores.topk(min(2, scores.shape[-1]), dim=-1)
        except Exception as error:
            self.reason = f"{type(error).__name__} while the scores were read"
            return
        self._parts["ids2"].append(ids)
        self._parts["scores2"].append(values)

    def _flush(self, torch: Any) -> None:
        """Move what has gathered to the host: one copy for hundreds of tokens, and no device memory held."""
        for name, part in self._parts.items():
            if part:
                kind = torch.int32 if name.startswith("ids") else torch.float32
                self._done[name].append(torch.stack(part).to(kind).cpu())
                part.clear()

    def seen(self) -> dict[str, object]:
        """Return what the loop was seen to do, as facts of the call."""
        if not self.rows:
            return {}
        facts: dict[str, object] = {"batch.num_beams_rows": self.rows}
        if self.mode == "sample":
            facts |= {"rng.device_of_sampling": self.device, "rng.batch_shape_at_sampling": self.rows}
        return facts

    def collect(self, torch: Any, lengths: list[int], dtype: str) -> list[Evidence]:
        """Return the evidence of each row, cut to its length. Raises ValueError where steps and lengths do not fit."""
        self._flush(torch)
        if self.steps < max(lengths, default=0):
            raise ValueError(f"{self.steps} steps were seen and {max(lengths)} tokens came out")
        whole = {name: torch.cat(part).transpose(0, 1) for name, part in self._done.items() if part}
        chosen = whole.get("scores2", whole["logits"])
        margins = chosen[..., 0] - chosen[..., 1] if chosen.shape[-1] > 1 else None
        flags = PROCESSED if "ids2" in whole else 0
        found = []
        for row, length in enumerate(lengths):
            head = HEAD.pack(VERSION, whole["ids"].shape[-1], flags, DTYPES.get(dtype, 0), length)
            planes = [tensor_bytes(whole[name][row, :length]) for name in self._parts if name in whole]
            margin, at = math.nan, 0
            if margins is not None and length:
                smallest = margins[row, :length].min(dim=0)
                margin, at = float(smallest.values), int(smallest.indices)
            found.append(Evidence(head + b"".join(planes), margin, at))
        return found


def observe(processors: Any, observer: Observer) -> Any:
    """Return a list that acts as ``processors`` does and lets the observer look on.

    Only a plain list of processors is replaced: a class of its own may call them its own way.
    """
    base = type(processors)
    observer.processors = [type(item).__name__ for item in processors]
    if observer.reason:
        return processors
    if base.__name__ != "LogitsProcessorList" or not base.__module__.startswith("transformers."):
        observer.reason = f"a {base.__name__} of its own calls the processors"
        return processors
    observed = _class(base)(processors)
    observed.provenance_observer = observer
    return observed


_classes: dict[type, type] = {}


def _class(base: type) -> type:
    """Make the observing subclass of the list of the transformers that is loaded."""
    if base not in _classes:

        def call(self: Any, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            observer = self.provenance_observer
            with Harmless("the logits of a token"):
                observer.look(sys.modules["torch"], scores)
            processed = base.__call__(self, input_ids, scores, **kwargs)
            if len(self):
                with Harmless("the scores of a token"):
                    observer.look_again(processed)
            return processed

        _classes[base] = type("ObservedLogitsProcessorList", (base,), {"__call__": call})
    return _classes[base]


def tensor_bytes(tensor: Any) -> bytes:
    """Return the bytes of a CPU tensor in row order, little-endian, without needing NumPy."""
    tensor = tensor.contiguous()
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return b""
    data = ctypes.string_at(tensor.data_ptr(), size)
    if sys.byteorder == "big":
        width = tensor.element_size()
        data = b"".join(data[i : i + width][::-1] for i in range(0, size, width))
    return data
