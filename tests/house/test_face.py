"""The face: what is exported, that it is really there, and that nothing exported bears a room's name."""

import ast
import re
from importlib import import_module
from pathlib import Path

import provenance

ROOT = Path(provenance.__file__).parent


def test_every_exported_name_is_there_and_documented() -> None:
    for name in provenance.__all__:
        value = getattr(provenance, name)
        if callable(value):
            assert value.__doc__, name


def test_all_is_complete_and_sorted() -> None:
    assert provenance.__all__ == sorted(provenance.__all__, key=lambda name: (not name.startswith("_"), name))
    assert set(provenance.__all__) == set(provenance._FACE) | {"__version__"}


def test_no_exported_name_is_a_rooms_name() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not rooms & (set(provenance.__all__) - {"__version__"})


def test_the_lazy_table_and_the_type_checkers_view_agree() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("provenance.")
        for alias in node.names
    }
    assert typed == provenance._FACE
    for name, module in provenance._FACE.items():
        assert getattr(import_module(module), name) is getattr(provenance, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(provenance, "no_such_thing")


def test_the_version_is_the_distributions() -> None:
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    assert found.group(1) == provenance.__version__


def test_public_functions_have_docstrings() -> None:
    bare = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{path.name}:{node.name}")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            overloaded = isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list)
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_") or overloaded:
                continue
            if not ast.get_docstring(node):
                bare.append(f"{path.name}:{node.name}")
    assert bare == []
