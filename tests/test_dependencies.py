"""What `pyproject.toml` asks for is what the code imports, program by program."""

import ast
import sys
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
ROOMS = ("tests", "e2e", "benchmarks", "charts", "docs", "examples", "images")
UNSEEN = {
    "nixl",  # by importlib, where P/D is asked for
    "transformers",  # by a child process that converts a tokenizer, with the three below
    "protobuf",
    "sentencepiece",
    "tiktoken",
}
"""Imported by the runtime in ways that its syntax trees do not show."""


def declared(*extras: str) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for extra in extras for text in EXTRAS[extra]}


@cache
def imported(folder: Path) -> frozenset[str]:
    """Top-level modules that the files under `folder` import, Python's own left out."""
    modules: set[str] = set()
    for file in folder.rglob("*.py"):
        if file.name.endswith("_client.py"):  # runs in an environment of its own: tests/clients
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                modules.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                modules.add(node.module.partition(".")[0])
    return frozenset(module for module in modules - sys.stdlib_module_names if not module.startswith("kvasir_"))


def distributions(modules: Iterable[str]) -> set[str]:
    """That ship these modules; a module that no distribution ships stands for itself."""
    return {canonicalize_name(name) for module in modules for name in shipped_by().get(module, [module])}


@cache
def shipped_by() -> Mapping[str, list[str]]:
    """Distributions of this environment by module."""
    return packages_distributions()


@pytest.mark.parametrize("program", ["operator", "router", "runtime"])
def test_a_program_declares_what_it_imports_and_nothing_else(program: str) -> None:
    shared = ["kvasir_logging"] if program == "operator" else ["kvasir_chat", "kvasir_http", "kvasir_logging"]
    folders = [ROOT / program / f"kvasir_{program}", *(ROOT / "router" / package for package in shared)]
    seen = distributions({module for folder in folders for module in imported(folder)})
    assert seen | (UNSEEN if program == "runtime" else set()) == declared(program)


def test_what_tests_and_tools_import_is_declared_somewhere() -> None:
    own = {file.stem for room in ROOMS for file in (ROOT / room).rglob("*.py")} | set(ROOMS)
    seen = distributions(module for room in ROOMS for module in imported(ROOT / room) - own)
    assert seen - declared(*EXTRAS) == set()
