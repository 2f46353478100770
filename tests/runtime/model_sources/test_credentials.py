"""No key is in what the loader prints, however much it is to log."""

import subprocess
import sys
from pathlib import Path

from tests.runtime.model_sources.conftest import environment
from tests.runtime.model_sources.hub_server import Hub

BOUND_SECONDS = 120
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAONLYINTHISTEST",
    "AWS_SECRET_ACCESS_KEY": "a-secret-access-key",
    "AWS_SESSION_TOKEN": "a-session-token",
}


def test_no_key_of_a_stores_that_refuses_is_printed(hub: Hub, tmp_path: Path) -> None:
    hub.faults.status = 403
    command = [sys.executable, "-m", "kvasir_runtime", "fetch", "s3://models/llama", str(tmp_path / "model")]
    env = environment(AWS_ENDPOINT_URL_S3=hub.url, AWS_REGION="us-east-1", **KEYS)
    output = subprocess.run(
        [*command, "--log-level", "debug"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BOUND_SECONDS,
        check=False,
    ).stdout
    assert "error: ModelAccessDenied" in output
    assert [name for name, value in KEYS.items() if value in output] == []
