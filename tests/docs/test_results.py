"""benchmarks/results/README.md lists every table there is, and whoever names a table names one that is there."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TABLES = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
A_TABLE = re.compile(r"(?<!git show 4800a08:benchmarks/results/)\b([\w.]+(?:-[\w.]+)*-20\d\d-\d\d-\d\d[\w-]*\.md)")
FOLDERS = ("docs", "e2e", "charts", "images", "examples", "operator", "router", "runtime", "tests")


def test_the_index_lists_every_table_once() -> None:
    listed = Counter(re.findall(r"\]\(([^)/]+)\)", (RESULTS / "README.md").read_text()))
    assert listed == Counter(TABLES)


def test_every_table_that_is_named_is_there() -> None:
    pages = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    named = {name: page for page in pages for name in A_TABLE.findall(page.read_text())}
    assert len(named) > 10
    assert {name: page for name, page in named.items() if name not in TABLES} == {}


def test_what_rests_on_a_table_names_it_or_its_benchmark() -> None:
    """A row of the index names the pages whose claims rest on its tables: they name the benchmark."""
    for row in (RESULTS / "README.md").read_text().splitlines():
        tables, pages = re.findall(r"\]\(([^)/]+)\)", row), re.findall(r"\]\(\.\./\.\./([^)]+)\)", row)
        for page in pages:
            benchmarks = {re.split(r"-(?:2026|llama|qwen3)", table)[0] for table in tables}
            text = (ROOT / page).read_text()
            assert any(benchmark in text for benchmark in benchmarks), f"{page} names none of {benchmarks}"


@pytest.mark.parametrize(
    ("page", "begin", "tables"),
    [
        ("README.md", "Beside vLLM's CPU build", "engine_cpu-*-2026-11-24-zen4.md"),
        ("docs/speculative.md", "## What it brings", "speculative-2026-11-26-*.md"),
        ("docs/routing.md", "On Mooncake's conversation trace", "routing-2026-11-22-matrix.md"),
    ],
)
def test_the_figures_of_a_page_stand_in_the_tables(page: str, begin: str, tables: str) -> None:
    claim = (ROOT / page).read_text().partition(begin)[2].partition("\n## ")[0]
    claim = claim if page.startswith("docs/spec") else claim.partition("\n\n")[0]
    figures = re.findall(r"\b\d\.\d\d\b", claim)
    assert figures
    written = "".join(path.read_text() for path in RESULTS.glob(tables))
    assert [figure for figure in figures if not re.search(rf"\b{re.escape(figure)}\b", written)] == []
