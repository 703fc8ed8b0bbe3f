"""The plan of the house: who may import whom, how large a room may grow, what an import may cost."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "provenance"
FILES = sorted(ROOT.rglob("*.py"))
assert len(FILES) >= 40

# Ground first. A room may import the rooms before it in this list, and itself.
FLOORS = [
    {"errors"},
    {"integrity"},
    {"facts", "catalogue"},
    {"settings", "privacy", "fingerprint", "journal", "store", "explain"},
    {"opening"},
    {"writer", "determinism"},
    {"recorder"},
    {"capture"},
    {"replay"},
    {"web", "cli", "__init__"},
    {"__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LINES, FUNCTION_LINES, ROOM_FILES = 400, 40, 10
# The plan gives these rooms a file for each runtime observed, each collector, family of commands and face of an answer.
LARGER = {"capture": 17, "integrity": 15, "fingerprint": 18, "cli": 29, "explain": 19, "store": 20, "determinism": 14}


def room_of(path: Path, root: Path = ROOT) -> str:
    return path.relative_to(root).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Rooms that a file imports: at the top, in a function or for typing alike."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "provenance" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "provenance":
                room = rest.split(".")[0]
                yield room if room in FLOOR else "__init__"


def violations(path: Path, root: Path = ROOT) -> list[str]:
    here = room_of(path, root)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [f"{here} must not import {room}" for room in imports(tree) if room != here and FLOOR[room] >= FLOOR[here]]


# The face names modules by text, and says the same to type checkers only: see the test of its table below.
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downstairs(path: Path) -> None:
    assert violations(path) == []


def test_a_planted_violation_turns_it_red(tmp_path: Path) -> None:
    room = tmp_path / "explain"
    room.mkdir()
    for source in (
        "from provenance.store import tables",
        "def f():\n    import provenance.store.queries",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from provenance.capture import call",
        "from provenance import recorder",
    ):
        planted = room / "planted.py"
        planted.write_text(source)
        assert violations(planted, tmp_path), source


def test_only_the_table_of_commands_and_the_lazy_tables_import_by_text() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        if "import_module(" in path.read_text(encoding="utf-8").replace('importlib.import_module("torch")', "")
    }
    # cli/gemma.py asks for a package of somebody else's, which is installed as it goes; replay/arms.py for the user's own
    assert users == {"__init__.py", "cli/main.py", "cli/gemma.py", "catalogue/fields.py", "replay/arms.py"}


@pytest.mark.parametrize(
    "heavy", ["torch", "sqlalchemy", "alembic", "pynvml", "psutil", "rich", "typer", "transformers"]
)
def test_importing_us_is_light(heavy: str) -> None:
    code = f"import provenance, sys; sys.exit({heavy!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_observing_loads_no_sql() -> None:
    """The observing wing, recording a function to the end, never loads SQLAlchemy or alembic."""
    code = (
        "import provenance, sys\n"
        "@provenance.record\ndef f(x): return x\n"
        "provenance.init(writer='off'); f(1)\n"
        "sys.exit(any(name in sys.modules for name in ('sqlalchemy', 'alembic', 'torch', 'typer')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


def test_explaining_and_reading_load_no_torch() -> None:
    code = (
        "import sys, provenance.explain.compare, provenance.explain.story, provenance.store.queries, provenance.store.export\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT.parent, check=False).returncode == 0


# -- sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LINES
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "a file opens with what it is"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"
            assert node.returns is not None, f"{node.name} says not what it returns"


def test_a_room_is_flat_and_small() -> None:
    for room in {path.parent for path in FILES if path.parent != ROOT}:
        files = [path for path in room.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= LARGER.get(room.name, ROOM_FILES), f"{room.name} has {len(files)} files"
        if room.name != "hook":  # the folder that Python itself looks into, of `provenance run`
            assert room.parent == ROOT, f"{room} is nested"


def test_no_code_unpickles_or_evaluates() -> None:
    banned = {"pickle", "marshal", "shelve", "dill", "joblib"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not banned & {alias.name.split(".")[0] for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                assert called not in ("torch.load", "yaml.load", "np.load", "numpy.load"), path


def test_no_todo_without_an_issue() -> None:
    for path in FILES:
        for line in path.read_text(encoding="utf-8").splitlines():
            if "TODO" in line or "FIXME" in line:
                assert "#" in line.partition("TODO")[2], f"{path}: {line.strip()}"
