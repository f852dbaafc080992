"""Imports run downwards, and importing the package is quiet and complete."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lightning_fedbayes

PACKAGE = Path(lightning_fedbayes.__file__).parent
PYPROJECT = PACKAGE.parent / "pyproject.toml"
LEVELS = (
    ("core",),
    ("data", "fusion", "metrics"),
    ("layers", "methods"),
    ("server",),
    ("modules",),
    ("clients",),
    ("callbacks",),
    ("transport",),
    ("__init__", "cli"),
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path):
    """The top-level package or module that a file belongs to."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(source):
    """Dotted names that a source text imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(source)):
        assert not getattr(node, "level", 0), "imports are absolute"
        module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        yield from (module + each.name for each in getattr(node, "names", []) if isinstance(each, ast.alias))


def trainers_of(source):
    """Names by which a source text reaches Lightning's Trainer or what runs inside it."""
    attributes = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Attribute)]
    names = [ast.unparse(each) for each in attributes if each.attr == "Trainer"]
    inside = re.compile(r"lightning\.(.+\.)?(Trainer|pytorch\.(trainer|loops)\..+)$")
    return names + [each for each in imported(source) if inside.match(each)]


MOST_IMPORTS = {"__init__.py": 22, "callbacks/federated_bayes.py": 12}
"""Most modules of this package that a file may import, 15 unless said otherwise."""


def test_imports_run_downwards_and_no_file_needs_more_than_a_reader_can_hold():
    """There are at most 14 entries, and rooms below the callbacks do not know the Trainer."""
    assert {room_of(path) for path in MODULES} == set(LEVEL)
    assert len([each for each in PACKAGE.iterdir() if each.name != "__pycache__"]) <= 14
    for path in MODULES:
        name, room, source = path.relative_to(PACKAGE).as_posix(), room_of(path), path.read_text()
        names = {each for each in imported(source) if each.split(".")[0] == "lightning_fedbayes"}
        firsts = {each.partition(".")[2].partition(".")[0] for each in names}
        others = {first if first in LEVEL else "__init__" for first in firsts}
        upwards = {other for other in others - {room} if LEVEL[other] >= LEVEL[room]}
        assert not upwards, f"{name}: '{room}' must not import from {sorted(upwards)}"
        assert len({each.rpartition(".")[0] for each in names}) <= MOST_IMPORTS.get(name, 15), name
        assert LEVEL[room] >= LEVEL["callbacks"] or not trainers_of(source), name


def warning_options():
    """The warning filters of the tests, for the command line: an error but for what is ignored there."""
    filters = tomllib.loads(PYPROJECT.read_text())["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters[0] == "error"
    return filters[1:]


@pytest.mark.slow
@pytest.mark.skipif(not PYPROJECT.is_file(), reason="an installed package has no pyproject.toml")
def test_import_warns_of_nothing_and_defines_every_public_name():
    """In a fresh process with the filters that the tests run under."""
    code = ["import warnings", "warnings.simplefilter('error')"]
    for text in warning_options():
        _, message, *category = text.split(":")
        code.append(f"warnings.filterwarnings('ignore', {message!r}, {category[0] if category else 'Warning'})")
    code += [
        "import lightning_fedbayes as fb",
        "assert sorted(set(fb.__all__)) == sorted(fb.__all__), 'a name is exported twice'",
        "print([name for name in fb.__all__ if not hasattr(fb, name)])",
    ]
    run = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("room", lightning_fedbayes._MOVED)
def test_a_name_that_has_moved_works_and_warns_with_its_place(room):
    module = importlib.import_module(f"lightning_fedbayes.{room}")
    for name in lightning_fedbayes._MOVED[room].split():
        with pytest.warns(FutureWarning, match=rf"fb\.{name} has moved: write fb\.{room}\.{name};"):
            assert getattr(lightning_fedbayes, name) is vars(module)[name]
        assert name not in lightning_fedbayes.__all__


def test_engines_are_imported_when_they_are_chosen():
    code = "import sys, lightning_fedbayes; print([name for name in sys.modules if '.vectorized' in name])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.stdout.strip() == "[]", run.stderr


@pytest.mark.slow
def test_a_server_loads_no_lightning_and_no_pictures():
    """It may run where nothing trains."""
    code = "import sys, lightning_fedbayes as fb; fb.Server, fb.ClientUpdate; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert not {"lightning", "sklearn", "matplotlib", "torchmetrics"} & {*run.stdout.split()}, run.stderr
