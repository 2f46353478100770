"""The operator's own settings; the flags of `kvasir-operator` are derived from this class by cli.py.

Nothing about one service belongs here: that is the manifest's.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from kvasir_operator.api import labels
from kvasir_operator.api.defaults import InstallationDefaults
from kvasir_operator.errors import InvalidSettingsError

_VERSION = version("kvasir")


ABOVE_ZERO: Final = sys.float_info.min
"""As the least of a number: 0 is too little."""


def _setting(default: Any, help_text: str, least: float = 0, most: float = 10**6) -> Any:
    """`least` and `most` are of a number."""
    return field(default=default, metadata={"help": help_text, "least": least, "most": most})


@dataclass(frozen=True)
class OperatorSettings:
    """What `run` and `render` need to know about the installation."""

    runtime_image: str = _setting(f"kvasir-runtime:{_VERSION}", "image of engine pods where the manifest names none")
    router_image: str = _setting(f"kvasir-router:{_VERSION}", "image of router pods")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = _setting(
        "IfNotPresent", "pull policy of every container"
    )
    image_pull_secret: tuple[str, ...] = _setting(
        (), "Secret for pulling the images of engine and router pods, in each service's namespace; may be repeated"
    )
    image_architecture: tuple[str, ...] = _setting(
        (), "kubernetes.io/arch that these images run on, amd64 by default; with several given, no node is ruled out"
    )
    router_cluster_role: str = _setting(
        "kvasir-router", "ClusterRole, or Role where single namespaces are watched, that routers' accounts are bound to"
    )
    namespace: tuple[str, ...] = _setting((), "watch this namespace only; may be repeated; default: the whole cluster")
    kubeconfig: str | None = _setting(
        None, "file with the cluster's address and credentials; default: the pod's own, then ~/.kube/config"
    )
    workers: int = _setting(8, "services reconciled at the same time", least=1, most=1000)
    max_upgrades: int | None = _setting(
        None,
        "services whose engines are replaced at the same time because the installation has changed, by an image or its "
        "defaults; default: all",
        least=1,
    )
    resync_seconds: float = _setting(
        300.0, "every service is looked at again after this many seconds", least=ABOVE_ZERO
    )
    retry_initial_seconds: float = _setting(
        0.5, "first wait after a failed pass; doubles with each failure", least=ABOVE_ZERO
    )
    retry_max_seconds: float = _setting(30.0, "longest wait after failed passes", least=ABOVE_ZERO)
    leader_election: bool = _setting(False, "hold a Lease while reconciling; needed where two operators run")
    lease_seconds: int = _setting(15, "how long a standby waits for a leader that ended without a word", least=3)
    lease_namespace: str | None = _setting(
        None, "namespace of that Lease; default: one in each watched namespace, else the pod's own"
    )
    cluster_lease_namespace: str = _setting(
        "default",
        "namespace of the Lease that lets one operator at a time serve the whole cluster; equal in all releases",
    )
    host: str = _setting("::", "address of the operator's metrics and probes; :: is every address, IPv6 and IPv4")
    port: int = _setting(
        labels.OPERATOR_PORT, "port of the operator's metrics and probes; 0 takes a free one", most=2**16 - 1
    )
    defaults: InstallationDefaults = field(default_factory=InstallationDefaults)
    """Pod defaults, profiles and the gateway, read from the file that `--pod-defaults` names."""
    gateway_secret: str | None = field(default=None, repr=False)
    """What the secrets of services behind the gateway are derived from, of the environment; None without a gateway."""
    network_policies: bool = _setting(True, "let only routers, the operator and Prometheus reach engines")
    prometheus_url: str | None = _setting(
        None, "Prometheus that autoscaling reads, up to what comes before /api/v1; default: replicas are not scaled"
    )
    prometheus_token_file: str | None = _setting(None, "file with the bearer token for it; read at every question")
    prometheus_basic_auth_folder: str | None = _setting(
        None, "folder of the files `username` and `password` for it, instead of a token; read at every question"
    )
    prometheus_headers_folder: str | None = _setting(
        None, "folder of further headers for it, a file each, such as X-Scope-OrgID; read at every question"
    )
    prometheus_ca_file: str | None = _setting(None, "certificates that it is trusted by; default: the system's")
    prometheus_verify: bool = _setting(True, "check its certificate")
    autoscaling_seconds: float = _setting(
        15.0, "autoscaled services are measured again after this many seconds", least=ABOVE_ZERO
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severe message that is logged")
    log_format: Literal["text", "json"] = _setting(
        "text", "lines of text, or an object of JSON a message: of the operator, of engines and of routers"
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            self._check_bounds(each.name, each.metadata)
        if self.retry_initial_seconds > self.retry_max_seconds:
            raise InvalidSettingsError(
                f"--retry-initial-seconds {self.retry_initial_seconds:g} is more than --retry-max-seconds "
                f"{self.retry_max_seconds:g}, the longest wait: lower it, or raise the longest"
            )
        if self.prometheus_url is not None and "@" in _host(self.prometheus_url):
            raise InvalidSettingsError(
                "--prometheus-url holds a user's name or password, which arguments, logs and statuses would show: "
                "leave them out, and give them by --prometheus-basic-auth-folder"
            )
        if self.prometheus_token_file and self.prometheus_basic_auth_folder:
            raise InvalidSettingsError(
                "--prometheus-token-file and --prometheus-basic-auth-folder are both set: one of them can be sent"
            )
        if self.defaults.gateway is not None and not self.gateway_secret:
            raise InvalidSettingsError(
                f"--pod-defaults names a gateway and {labels.GATEWAY_SECRET_ENV} is not set: set it to the gateway's "
                "own value, or leave the gateway out"
            )

    def _check_bounds(self, name: str, bounds: Mapping[str, Any]) -> None:
        value = getattr(self, name)
        if isinstance(value, int | float) and not bounds["least"] <= value <= bounds["most"]:  # nan is not
            least, most = bounds["least"], bounds["most"]
            expected = f"more than 0 and at most {most}" if least == ABOVE_ZERO else f"{least} to {most}"
            raise InvalidSettingsError(f"--{name.replace('_', '-')} is {value}: expected {expected}")


def _host(url: str) -> str:
    """With a user's name and the port."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port):
            return parts.netloc
    except ValueError:  # brackets or a port that are none
        pass
    raise InvalidSettingsError("--prometheus-url is no address: expected http://HOST:PORT or https://HOST:PORT")
