"""A model trained in each format makes real calls, as it chooses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.cli.conftest import running_servers
from tests.runtime.cli.test_tool_calls import BOTH, NO_THOUGHT, PARIS, QUESTION, ask, calls_of, client_of

SCRIPT = Path(__file__).parents[3] / "examples/models/train_caller.py"
FORMATS = (
    "gemma4", "glm45", "kimi_k2", "llama3_json", "minimax_m2", "mistral", "pythonic", "qwen3_coder",
)  # fmt: skip
"""All that the script has, but for the committed model's."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_trained_in_a_format_is_read(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    folder = tmp_path / "caller"
    subprocess.run([sys.executable, str(SCRIPT), str(folder), "--format", name], env=environment, check=True)
    with running_servers(folder) as start:
        client = client_of(start("--dtype", "float32").wait_ready())
        for more in ({}, {"extra_body": NO_THOUGHT}):
            choice = ask(client, QUESTION, model="caller", **more)
            assert (choice.finish_reason, choice.message.content, calls_of(choice)) == ("tool_calls", None, PARIS)
        both = ask(client, {"role": "user", "content": "What is the time in Oslo and Rome?"}, model="caller")
        assert calls_of(both) == BOTH
        forced = ask(client, {"role": "user", "content": "Hello"}, model="caller", tool_choice="required")
        assert all(list(arguments) == ["city"] for _, arguments in calls_of(forced))
        assert calls_of(forced)
