"""Starting the operator where it cannot start."""

from pathlib import Path

import pytest

from kvasir_operator.errors import KubeUnavailableError, KvasirOperatorError
from kvasir_operator.run import run_operator
from kvasir_operator.settings import OperatorSettings

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
"""


def test_an_unreadable_kubeconfig_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(KvasirOperatorError, match=f"address and credentials from {missing}"):
        run_operator(OperatorSettings(kubeconfig=str(missing)))


def test_an_api_server_that_does_not_answer_is_told(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    with pytest.raises(KubeUnavailableError, match="did not answer"):
        run_operator(OperatorSettings(kubeconfig=str(tmp_path / "config")))
