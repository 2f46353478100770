"""Facts about the tree that a wrong file would break in ways that are hard to trace."""

from pathlib import Path

from tests.seams import reaches

ROOT = Path(__file__).parents[1]


def test_operator_folder_is_no_package():
    assert not (ROOT / "operator" / "__init__.py").exists(), "it would shadow Python's own module `operator`"


def test_tests_hold_no_packages():
    assert list((ROOT / "tests").rglob("__init__.py")) == [], "equal file names collide without importlib mode"


def test_top_level_holds_only_the_rooms_of_the_design():
    programs = {"operator", "runtime", "router", "crds", "charts", "images"}
    around = {"tests", "e2e", "docs", "examples", "benchmarks"}
    made = {"build", "dist"}  # by `make docs` and `images/release`; git ignores them
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    assert folders <= programs | around | made


def test_tests_speak_to_seams_that_a_caller_has():
    found = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, what in reaches(path.read_text())
    ]
    assert found == [], "hand a part its clock, transport or limit, and look at what it gives back"


def test_what_no_caller_has_is_found_in_a_test():
    source = """
from kvasir_router.picker import Picker, _weigh
from kvasir_router import picker

def test_it(monkeypatch):
    Picker()._order
    monkeypatch.setattr(picker, "LIMIT", 1)
    monkeypatch.setattr("kvasir_router.picker.LIMIT", 1)
    monkeypatch.setattr(given, "_order", 1)
    monkeypatch.setenv("HOME", "/")
    given.order.append(1)
"""
    assert [line for line, _ in reaches(source)] == [2, 6, 7, 8, 9]
