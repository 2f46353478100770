"""Facts about the tree that a wrong file would break in ways that are hard to trace."""

from pathlib import Path

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
