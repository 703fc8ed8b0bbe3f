"""A recorded call made again: load, restore, run, record.

The call goes through the ordinary capture, so a replay is itself a recorded run, of kind ``replay``, tagged with the
run that it repeats. It is not made where something that decides its output cannot be restored, unless that field is
allowed to differ. The process is afterwards as it was.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from provenance import recorder as recorders
from provenance.capture import call, wrap
from provenance.errors import CouldNotTell, UsageError
from provenance.facts import Run
from provenance.replay import plan as plans
from provenance.replay import states
from provenance.replay.load import Loaded
from provenance.replay.plan import ASKED, NEEDED, Lost, Plan

TAG = "replay_of"
PATIENCE = 600.0  # seconds: the weights of a large model are still being hashed
Named = Callable[[str], bool]
NOT_RUN = frozenset({"weights.loaded_root", "weights.files_root"})  # other weights: the answer is known without a run


REPLAY, PROBE = "replay", "probe"


@dataclass(slots=True)
class Rerun:
    """What became of one replay: its run, or why there is none, and what was not as in the original."""

    original: Run
    run_id: str = ""
    lost: list[Lost] = field(default_factory=list)
    refused: list[Lost] = field(default_factory=list)  # of these, what forbade the call
    error: str = ""  # the call was made, and raised
    run: Run | None = None  # as recorded, once it has been fetched

    @property
    def other_weights(self) -> bool:
        """Say whether it was not made because the weights are others."""
        return any(item.field in NOT_RUN for item in self.refused)


def refused(lost: Sequence[Lost], allowed: Named) -> list[Lost]:
    """Return the losses under which a call is not made."""
    return [item for item in lost if item.level == NEEDED or (item.level == ASKED and not allowed(item.field))]


def rerun(
    original: Run, loading: Callable[[], Loaded], allowed: Named = lambda _: False, *, own_switches: bool = False,
    kind: str = REPLAY,
) -> Rerun:  # fmt: skip
    """Make a recorded call again, and record it. ``loading`` gives its model, and is asked only if it can be made.

    ``kind`` is that of the new run: ``replay``, or ``probe`` for one that counts as traffic.

    Raises UsageError for a run that is no `generate` of transformers, or where nothing can be recorded, and what
    loading raises.
    """
    if recorders.current() is None:
        raise UsageError(f"a replay is a recorded run, and nothing can be recorded here: {recorders.refused()}.")
    plan = plans.make(original)
    made = Rerun(original, lost=list(plan.lost))
    if any(item.level == NEEDED for item in made.lost):
        made.refused = refused(made.lost, allowed)
        return made
    loaded = loading()
    made.lost += loaded.lost
    if loaded.tokenizer is None and _stops(plan):
        made.lost.append(Lost("generation.stop_strings", "they are found by a tokenizer, and there is none", ASKED))
    made.refused = refused(made.lost, allowed)
    if made.refused:
        return made
    with states.held(original, plan, own_switches) as missing:
        made.lost += missing
        made.refused = refused(missing, allowed)
        if not made.refused:
            _generate(made, plan, loaded, kind)
    return made


def _generate(made: Rerun, plan: Plan, loaded: Loaded, kind: str) -> None:
    model, before = loaded.model, loaded.model.generation_config
    own, arguments = _settings(plan, made.lost)
    arguments |= _inputs(plan, loaded)
    if _stops(plan):
        arguments["tokenizer"] = loaded.tokenizer
    _history(model, made.original)
    model.generation_config = own
    try:
        wrap.wrap(model, loaded.tokenizer)
        with call.run(tags={TAG: made.original.run_id}) as block:
            block.kind = kind
            try:
                with warnings.catch_warnings():  # the original has warned whom it concerns
                    warnings.simplefilter("ignore")
                    model.generate(**arguments)
            except Exception as error:
                made.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        made.run_id = block.run_id
    finally:
        wrap.uninstrument(model)
        model.generation_config = before


def _stops(plan: Plan) -> bool:
    return any(table.get("stop_strings") for table in (plan.call, plan.config, plan.own, plan.library))


def _inputs(plan: Plan, loaded: Loaded) -> dict[str, Any]:
    torch, device = sys.modules["torch"], loaded.model.device
    rows = {"inputs": plan.ids, "attention_mask": plan.mask}
    return {
        name: torch.tensor(given, dtype=torch.long, device=device).reshape(len(given), -1)
        for name, given in rows.items()
        if given is not None
    }


def _history(model: Any, original: Run) -> None:
    """Put back the hidden history of the model: a static cache is as long as the longest earlier call."""
    name = "_previous_max_cache_length"
    if hasattr(model, name):
        delattr(model, name)
    longest = plans.value(original, "model.previous_max_cache_length")
    if isinstance(longest, int):
        setattr(model, name, longest)


# -- settings ---------------------------------------------------------------------------------------


def _settings(plan: Plan, lost: list[Lost]) -> tuple[Any, dict[str, Any]]:
    """Return the model's generation config and the arguments under which `generate` resolves to what was recorded.

    Each value is set by the hand that set it then: by the call, by its configuration, by the model's own. What nobody
    had set is left to the library, and set only where the library's default has changed since. The configuration that
    lies beside the checkpoint has no say.
    """
    from transformers import GenerationConfig

    blank = GenerationConfig()
    library = {**_public(blank), **getattr(GenerationConfig, "_get_default_generation_params", dict)()}
    own, given = GenerationConfig(), GenerationConfig()
    arguments: dict[str, Any] = {}
    for place, table in ((own, plan.own), (given, plan.config), (arguments, plan.call)):
        for name, stored in table.items():
            if name not in library and stored is not None:
                lost.append(Lost(f"generation.{name}", f"this transformers has no such setting, and it was {stored}"))
            elif isinstance(place, dict):
                place[name] = _built(name, stored)
            else:
                setattr(place, name, _built(name, stored))
    _defaults(plan, library, own, arguments, lost)
    if plan.config:
        arguments["generation_config"] = given
    return own, arguments


def _defaults(plan: Plan, library: dict[str, Any], own: Any, arguments: dict[str, Any], lost: list[Lost]) -> None:
    """Set what nobody had set, where the library's default is another now."""
    if plan.length is not None and library.get("max_length") != plan.length:
        own.max_new_tokens = plan.length
    for name, stored in plan.library.items():
        if name not in library:
            if stored not in (None, False, 0, 1, 1.0):
                lost.append(Lost(f"generation.{name}", f"this transformers has no such setting, and it was {stored}"))
        elif library[name] != stored and stored is None:
            arguments[name] = None
        elif library[name] != stored:
            setattr(own, name, _built(name, stored))


def _built(name: str, stored: Any) -> Any:
    """Make the object that a setting is, where it is one of data alone."""
    if name == "compile_config" and isinstance(stored, dict):
        from transformers import CompileConfig

        return CompileConfig(**{key: part for key, part in stored.items() if key != "type"})
    return stored


def _public(config: Any) -> dict[str, Any]:
    return {name: part for name, part in vars(config).items() if not name.startswith("_")}


# -- the records ------------------------------------------------------------------------------------


def fetch(reruns: Sequence[Rerun]) -> None:
    """Read replays back from the store, once everything about them is written.

    Raises CouldNotTell where they could not be written.
    """
    recorder = recorders.current()
    made = [item for item in reruns if item.run_id]
    if recorder is None or not made:
        return
    if not recorder.flush(PATIENCE):
        raise CouldNotTell("the replays wait in the spool and are not in the database; `provenance writer` moves them.")
    from provenance.store import database, queries

    engine = database.reading(recorder.places.url, recorder.places.database)
    try:
        for item in made:
            item.run = queries.load(engine, item.run_id)
    finally:
        engine.dispose()
