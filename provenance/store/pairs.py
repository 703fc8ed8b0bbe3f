"""Pairs of runs with equal input, counted as they come in: how often two answers to one question differ, by the hour.

The first run of a group waits, the second is compared with it, the third waits again: each run stands in one pair at
most, as in `blame`, so that a run that strays strays once. What is kept is counts, by hour, environment, host and model
of the later run, and whether the environments of the two are others; the reader adds them up and sees no run at all.

Where two outputs differ their texts are read, and evened out by the profile ``surface``: most pairs are equal, and cost
nothing. A pair whose texts are not kept is ``untold``: it differs, and whether on the surface alone is not known.
"""

from typing import Any, NamedTuple

from provenance.facts import ROLE
from provenance.integrity import values
from provenance.integrity.text import normalize
from provenance.store import codec
from provenance.store.rows import Bulk

HOUR = 3_600_000_000_000
PROFILE = "surface"
READ = 50  # pairs whose texts are in memory at once
NO_MODEL = 0
TEXT, VALUE = ROLE["output.text"], ROLE["output.value"]
Row = tuple[int, int, str, int, int]  # hour, environment, host, model, whether the environments are others
Counts = list[int]  # pairs, differed, of those on the surface alone, of those not told

_HOURS = """insert into pair_hours(hour, environment, host, model, across, pairs, differed, surface, untold)
    values(?,?,?,?,?,?,?,?,?) on conflict(hour, environment, host, model, across) do update
    set pairs = pair_hours.pairs + excluded.pairs, differed = pair_hours.differed + excluded.differed,
    surface = pair_hours.surface + excluded.surface, untold = pair_hours.untold + excluded.untold"""
_TEXTS = f"""select r.run, r.prompt_index, r.return_index, r.role, r.size, p.codec, p.data from payload_refs r
    join payloads p on p.id = r.body where r.role in ({TEXT},{VALUE}) and r.run"""
_WAITING = """select grp, open_run, open_prompt, open_return, open_output, open_environment from equal_inputs
    where open_run is not null and grp"""


class Half(NamedTuple):
    """A run that waits for another one of its group."""

    run: int
    prompt: int
    ret: int
    output: bytes
    environment: int


NOBODY = (None,) * len(Half._fields)


class Pairs:
    """The pairs of one transaction."""

    def __init__(self, bulk: Bulk, host: str) -> None:
        self.bulk, self.host = bulk, host
        self.came: dict[bytes, list[tuple[Half, int, int]]] = {}  # with hour and model

    def meet(self, group: bytes, run: dict[str, Any], sequence: dict[str, Any]) -> None:
        """Note that a sequence has come into its group. A replay is no traffic; a probe stands in for it."""
        if run["kind"] in ("call", "probe"):
            half = Half(run["id"], sequence["prompt_index"], sequence["return_index"], bytes(sequence["output_key"]),
                        run["environment"] or 0)  # fmt: skip
            self.came.setdefault(group, []).append((half, run["started_at"] // HOUR, run["model"] or NO_MODEL))

    def settle(self, groups: list[bytes]) -> dict[bytes, tuple[Any, ...]]:
        """Pair those that came, write the counts, and return who waits in each group now."""
        waiting: dict[bytes, tuple[Any, ...]] = dict.fromkeys(groups, NOBODY)
        for group, run, prompt, ret, output, environment in self.bulk.among(_WAITING, groups):
            waiting[bytes(group)] = Half(run, prompt, ret, bytes(output), environment)
        counts: dict[Row, Counts] = {}
        differing: list[tuple[Half, Half, Counts]] = []
        for group, came in self.came.items():
            for half, hour, model in came:
                before = waiting[group]
                if not isinstance(before, Half):
                    waiting[group] = half
                    continue
                waiting[group] = NOBODY
                row = (hour, half.environment, self.host, model, int(before.environment != half.environment))
                found = counts.setdefault(row, [0, 0, 0, 0])
                found[0] += 1
                if before.output != half.output:
                    found[1] += 1
                    differing.append((before, half, found))
        for place in range(0, len(differing), READ):
            self._look(differing[place : place + READ])
        self.bulk.many(_HOURS, [(*row, *found) for row, found in counts.items()])
        self.came.clear()
        return waiting

    def _look(self, differing: list[tuple[Half, Half, Counts]]) -> None:
        """Read the texts of some pairs, and count those that differ on the surface alone."""
        asked = sorted({half.run for one, other, _ in differing for half in (one, other)})
        texts: dict[tuple[int, int, int], str | None] = {}
        for run, prompt, ret, role, size, kind, data in self.bulk.among(_TEXTS, asked):
            if role == TEXT or (run, prompt, ret) not in texts:
                texts[run, prompt, ret] = _text(role, kind, bytes(data), size)
        for one, other, counts in differing:
            a, b = texts.get(one[:3]), texts.get(other[:3])
            if a is None or b is None:
                counts[3] += 1
            elif normalize(a, PROFILE) == normalize(b, PROFILE):
                counts[2] += 1


def _text(role: int, kind: int, data: bytes, size: int) -> str | None:
    """Return the text of an output, or None where it has none."""
    try:
        body = codec.unpack(kind, data, size)
        if role == TEXT:
            return body.decode("utf-8", "surrogatepass")
        value = values.decode(body)
    except Exception:  # damaged: `verify` says so, and the pair is not told
        return None
    return value if isinstance(value, str) else None
