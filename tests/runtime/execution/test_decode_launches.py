"""What a steady decode step launches on CUDA, in figures that only change on purpose; and that it waits for nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
COUNTER = Path(__file__).with_name("decode_launches.py")
"""Not imported: it changes torch."""


def launches_of(*methods: str) -> dict[str, Any]:
    """Of each method and kind of sampling; in a process that Triton's interpreter is not used in."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'runtime'}{os.pathsep}{ROOT}"
    command = [sys.executable, str(COUNTER), "--json", *methods]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    found: dict[str, Any] = json.loads(child.stdout)
    for name, step in found.items():
        assert step["host_reads"] == [], name
        assert step["num_uploads"] == 0, name
        assert step["num_downloads"] == 1, name
        assert step["before"] == {"_prepare_inputs_kernel": 1, "_load_inputs_kernel": 1}, name
    return found


def test_a_decode_step_launches_no_more_than_it_did() -> None:
    found = launches_of("none")
    greedy, top_p = found["none, greedy"], found["none, top_p"]
    assert greedy["after"] == {"_verify_most_likely_kernel": 1}
    assert top_p["after"] == dict.fromkeys(
        ("_find_largest_kernel", "_find_nucleus_kernel", "_draw_kernel", "_verify_drafts_kernel"), 1
    )
    for step in found.values():
        assert (step["num_graphs"], step["num_products"]) == (1, 1), "the layers, and the head"


@pytest.mark.slow
def test_drafts_are_made_in_no_more_launches_and_wait_for_nothing() -> None:
    found = launches_of("medusa", "eagle", "eagle3", "draft_model")
    counts = {name: (step["num_graphs"], sum(step["after"].values())) for name, step in found.items()}
    assert counts == {
        "medusa, greedy": (1, 33),
        "medusa, top_p": (1, 36),
        "eagle, greedy": (4, 85),
        "eagle, top_p": (4, 88),
        "eagle3, greedy": (4, 92),
        "eagle3, top_p": (4, 95),
        "draft_model, greedy": (4, 101),
        "draft_model, top_p": (4, 104),
    }
