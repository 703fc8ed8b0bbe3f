"""The models this process has seen: what each is, which load of it is in force, and the hashing of its weights.

A model that changed between two calls (one tensor written to, cast, moved, swapped, an adapter attached) is a
new *load* with a new number. Its digest comes late, from a thread that wants no core that anybody else wants:
calls carry the number, and a later record binds the number to the root. If tensors changed before hashing
ended, the binding says that instead.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from provenance import privacy
from provenance.capture.call import NOTHING
from provenance.facts import Field, Fingerprint, WeightsManifest
from provenance.fingerprint import engines, files, weights
from provenance.fingerprint import model as readers
from provenance.fingerprint.reading import Missing
from provenance.integrity.canonical import named, raw
from provenance.recorder import Harmless, Recorder
from provenance.settings import remembered_digests

DRAFT = ("class", "name_or_path", "revision", "config_digest", "dtype")


class Watched:
    """One model object. Holds it weakly: a deleted model is gone."""

    def __init__(self, model: Any, forget: Any) -> None:
        self.model = weakref.ref(model, forget)
        self.tokenizer: Any = None
        self.guard: tuple[object, ...] = ()
        self.held = weights.Held()  # what parts of the model keep in attributes
        self.passing: set[str] = set()  # of those, what calls were seen to change
        self.settled = False  # a call has ended: what it made is known
        self.fingerprint: Fingerprint | None = None
        self.recorder: Any = None
        self.load = 0
        self.root = NOTHING
        self.capture = ""  # of an engine: what its fingerprint keeps of content
        self.manifests: dict[str, WeightsManifest] = {}  # by kind, once hashed
        self.facts: dict[str, Field] = {}  # what a call that outlasts the hashing says of its weights itself
        self.first_seq = 0
        self.files: str | None = None  # of an engine: where its weights came from


class Models:
    """All models seen, by identity. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._watched: dict[int, Watched] = {}
        self._loads = 0

    def unlock(self) -> None:
        """Start over with a free lock, in a forked child."""
        self._lock = threading.RLock()

    def watched(self, model: Any) -> Watched:
        """Return what is kept of a model, making it on first sight."""
        with self._lock:
            found = self._watched.get(id(model))
            if found is None or found.model() is not model:
                key = id(model)
                found = Watched(model, lambda _: self._watched.pop(key, None))
                self._watched[key] = found
            return found

    def know_tokenizer(self, model: Any, tokenizer: Any) -> None:
        """Remember which tokenizer belongs to a model."""
        known = self.watched(model)
        if tokenizer is not None and known.tokenizer is not tokenizer:
            known.tokenizer = tokenizer
            known.guard = ()  # the fingerprint of the model names its tokenizer

    def prepare(self, recorder: Recorder | None, model: Any) -> None:
        """Read process and model in a thread of ours, before the first call has to: a driver may take seconds."""
        if recorder is not None:
            known = self.watched(model)
            recorder.spawn(lambda: self._read(recorder, known), "look")

    def _read(self, recorder: Recorder, known: Watched) -> None:
        with Harmless("the state of a model before its first call"):
            recorder.environment.environment()
            model = known.model()
            if model is None:
                return
            guard = _guard(known, model)
            with self._lock:
                if guard != known.guard:
                    known.fingerprint = readers.fingerprint(model, known.tokenizer)
                    known.root, known.manifests, known.facts = NOTHING, {}, {}
                    known.held = weights.Held(model, known.passing)
                    known.guard, known.recorder = _guard(known, model), None

    def look(self, recorder: Recorder, model: Any) -> Watched:
        """See whether a model is still what it was; if not, or at first sight, read it and have its weights hashed."""
        known = self.watched(model)
        guard = _guard(known, model)
        if guard == known.guard and known.recorder is recorder:
            return known
        with self._lock:
            if guard == known.guard and known.recorder is recorder:
                return known
            same = known.fingerprint is not None and guard == known.guard
            kept = readers.load(guard) == readers.load(known.guard)
            if not same:
                known.fingerprint = readers.fingerprint(model, known.tokenizer)
            if not same and kept and known.recorder is recorder:  # put together otherwise, of the very same tensors
                known.guard = guard
                return known
            if not same:
                known.root, known.manifests, known.facts = NOTHING, {}, {}
                known.held = weights.Held(model, known.passing)
                guard = _guard(known, model)
            self._loads += 1
            known.load, known.guard, known.recorder = self._loads, guard, recorder
            known.first_seq = recorder.journal.next_seq
            for manifest in known.manifests.values():  # another stream, perhaps another store: it has none of them
                recorder.note("weights", raw(manifest.root), manifest.document())
            if known.root == NOTHING:
                self._hash(recorder, known, model)
            return known

    def settle(self, known: Watched, model: Any) -> None:
        """See at the end of a call what it changed in attributes: caches. The next load leaves them out.

        What is new after the first call is one too. A table that only went to another device stays.
        """
        with self._lock:
            before = known.guard[0] if known.guard else {}
            after = known.held if known.settled else weights.Held(model, known.passing)
            known.settled = True
            now = after.marks()
            if now == before or not isinstance(before, dict):
                return
            changed = {name for name, mark in now.items() if before.get(name) != mark}
            changed -= {name for name in changed & before.keys() if weights.moved(before[name], now[name])}
            known.passing |= changed
            if changed & before.keys():
                known.guard = ()

    def draft(self, recorder: Recorder, model: Any) -> dict[str, Any]:
        """Return what a call says of the model that drafts for it. Its weights are hashed like those of any other."""
        known = self.look(recorder, model)
        print_ = known.fingerprint
        found = [print_.fields.get(f"model.{name}") for name in DRAFT] if print_ is not None else []
        facts = {f"draft.{item.name.removeprefix('model.')}": {"$field": item.document()} for item in found if item}
        root = known.facts.get("weights.loaded_root") or Field.unknown("draft.weights_root", "not hashed yet")
        if known.root != NOTHING:
            root = Field("draft.weights_root", named(known.root), source="hashed")
        return {**facts, "draft.weights_root": {"$field": root.document()}}

    def look_at_engine(self, recorder: Recorder, engine: Any, runtime: engines.Runtime) -> Watched:
        """See whether an engine still runs with the same settings; if not, read them, and have its files hashed."""
        known = self.watched(engine)
        now = engines.snapshot(engine, runtime)
        with self._lock:
            kept = recorder.settings.capture
            same = known.fingerprint is not None and engines.unchanged(known.guard, now) and known.capture == kept
            if same and known.recorder is recorder:
                return known
            if not same:
                found = engines.fingerprint(engine, runtime)
                known.fingerprint, known.capture = _covered(found, kept, recorder.key), kept
                place = engines.quiet(engine, runtime.checkpoint)
                known.files = os.fspath(place) if isinstance(place, (str, os.PathLike)) else ""
            self._loads += 1
            known.load, known.guard, known.recorder = self._loads, now, recorder
            known.first_seq, known.facts = recorder.journal.next_seq, {}
            why = f"{runtime.name} holds its weights itself: only its files are hashed"
            known.facts["weights.loaded_root"] = Field.unknown("weights.loaded_root", why)
            if recorder.settings.weights != "off":
                recorder.spawn(Job(recorder, known, []).run_files, "weights")
            return known

    # -- hashing ----------------------------------------------------------------------------------

    def _hash(self, recorder: Recorder, known: Watched, model: Any) -> None:
        if recorder.settings.weights == "off":
            Job(recorder, known, []).bind("", "hashing is off (weights=off)")
            return
        # Weak references: hashing must not keep alive what its owner wants freed.
        found = [*weights.named(model), *known.held.items()]
        items = [(kind, name, weakref.ref(item)) for kind, name, item in found]
        recorder.spawn(Job(recorder, known, items).run, "weights")


def _guard(known: Watched, model: Any) -> tuple[object, ...]:
    return _marked(known.held, model)


def _marked(held: weights.Held, model: Any) -> tuple[object, ...]:
    return (held.marks(), *readers.guard(model))  # `settle` reads the first, `readers.load` leaves the last out


def _covered(found: Fingerprint, mode: str, key: bytes) -> Fingerprint:
    """Return the fingerprint of an engine without texts of the user's: a chat template may be one."""
    if mode == privacy.FULL:
        return found
    texts = privacy.CONTENT & {name.rpartition(".")[2] for name in found.fields}
    if not texts:
        return found
    fields = found.fields.values()
    covered = [f if f.name.rpartition(".")[2] not in texts else privacy.guarded([f], mode, key)[0] for f in fields]
    return Fingerprint.of(found.scope, covered)


class Job:
    """The hashing of one load, in a thread of its own."""

    def __init__(self, recorder: Recorder, known: Watched, items: list[tuple[str, str, Any]]) -> None:
        self.recorder, self.known, self.items = recorder, known, items
        # As they are now: the next load may begin before this one is hashed.
        self.load, self.guard, self.first_seq = known.load, known.guard, known.first_seq
        self.held = known.held
        self.rooted = False

    def run(self) -> None:
        """Hash, and write the manifest and its binding, or the reason why there is none."""
        try:
            if self.recorder.settings.weights == "tensors":
                self._tensors()
            self._files()
        except weights.Stopped:
            ending = self.recorder.closing.is_set()
            self.bind("", "process ended" if ending else "changed while hashed")
        except Exception as error:
            self.recorder.failed("the weights of a model", error)
            self.bind("", f"{type(error).__name__} while hashed")

    def run_files(self) -> None:
        """Hash the files of an engine, where they lie on this machine."""
        try:
            folder = files.located(self.known.files or "", None, os.environ)
            manifest, how = files.of_files(folder, self._stop, remembered_digests())
            self._write(manifest, how)
            self._inside(folder, how)
        except (Missing, OSError, weights.Stopped):
            return  # a name of a hub, a folder that is gone, the end of the process: the calls say what is unknown
        except Exception as error:
            self.recorder.failed("the files of an engine", error)

    def _tensors(self) -> None:
        def alive(reference: Any) -> Any:
            tensor = reference()
            if tensor is None:
                raise Missing("a tensor was released while it was hashed")
            return tensor

        entries: list[Any] = []
        done: dict[object, str] = {}
        try:
            if unread := self.held.reason():
                raise Missing(unread)
            for kind, name, reference in self.items:
                entries += weights.entries(kind, name, alive(reference), done, self._stop)
        except Missing as why:  # the files can still be hashed
            self.bind("", str(why))
            return
        if self._changed():
            raise weights.Stopped
        self._write(WeightsManifest("tensors", tuple(entries)))
        self._more(entries, {name: reference for _, name, reference in self.items}, alive)

    def _more(self, entries: list[Any], items: dict[str, Any], alive: Callable[[Any], Any]) -> None:
        """Say what the parameters come to without buffers, and in narrower types: what a cast hides is seen by that."""
        found: dict[str, Callable[[], str]] = {"weights.parameters_root": lambda: weights.parameters(entries)}
        for kind, field in weights.HALVES.items():
            found[field] = partial(weights.narrowed, entries, lambda name: alive(items[name]), kind, self._stop)
        for field, make in found.items():
            try:
                made = Field(field, make(), source="hashed")
            except weights.Stopped:
                raise
            except Exception as why:  # the root is written, and files are yet to be hashed
                made = Field.unknown(
                    field, str(why) if isinstance(why, Missing) else f"{type(why).__name__} while cast"
                )
            if self._changed():
                raise weights.Stopped
            if self.known.load == self.load:
                self.known.facts[field] = made

    def _files(self) -> None:
        """Hash the files that the model came from. That they cannot be found is no failure: many models have none."""
        model = self.known.model()
        if model is None:
            return
        try:
            folder = files.checkpoint(model, os.environ)
            del model
            manifest, how = files.of_files(folder, self._stop, remembered_digests())
        except (Missing, OSError) as why:
            if self.recorder.settings.weights == "files":
                self.bind("", str(why))
            return
        self._write(manifest, how)
        if not self.rooted:
            self._inside(folder, how)
        if self.recorder.settings.weights == "files":
            self.bind("", "tensors in memory are not hashed (weights=files)")

    def _inside(self, folder: Path, how: str) -> None:
        """Digest the tensors in the files, where those in memory are not known: other files may hold the same."""
        if how == "hub":
            return  # the files were not read, and are not read for this
        with contextlib.suppress(Missing, OSError):
            root = files.tensors_root(folder, self._stop, remembered_digests())
            if self.known.load == self.load:
                self.known.facts["weights.tensors_root"] = Field("weights.tensors_root", root, source="files")

    def _write(self, manifest: WeightsManifest, how: str = "hashed") -> None:
        root = manifest.root
        self.recorder.note("weights", raw(root), manifest.document())
        if self.known.load == self.load:  # before the binding: it speaks of calls that have ended by then
            self.known.manifests[manifest.kind] = manifest
            if manifest.kind == "tensors":
                self.known.root = raw(root)
            else:
                self.known.facts["weights.files_root"] = Field("weights.files_root", root, source=how)
        self.rooted |= manifest.kind == "tensors"
        self.bind(root, "", manifest.kind, how)

    def bind(self, root: str, reason: str, kind: str = "tensors", how: str = "hashed") -> None:
        """Write the record that says which weights the calls of this load ran on, or why that is not known.

        It reaches the calls that began before it; those that end after it carry root or reason themselves.
        """
        if reason and self.rooted:
            return  # only the files were not hashed
        if reason and self.known.load == self.load:
            self.known.facts["weights.loaded_root"] = Field.unknown("weights.loaded_root", reason)
        upto = self.recorder.journal.next_seq
        document = {"load": self.load, "kind": kind, "from": self.first_seq, "to": upto, "root": root}
        if reason:
            document["reason"] = reason
        if how != "hashed":
            document["how"] = how  # a digest from a cache is a claim about the file and not a look at it
        data = orjson.dumps(document, option=orjson.OPT_SORT_KEYS)
        try:
            self.recorder.note("binding", raw(root) if root else NOTHING, data)
        except Exception as error:
            self.recorder.failed("the weights of a model", error)

    def _stop(self) -> bool:
        return self.recorder.closing.is_set() or self.known.load != self.load

    def _changed(self) -> bool:
        model = self.known.model()
        return model is not None and readers.load(_marked(self.held, model)) != readers.load(self.guard)


MODELS = Models()
if hasattr(os, "register_at_fork"):
    # A lock that another thread held at the fork would never be freed in the child.
    os.register_at_fork(after_in_child=MODELS.unlock)
