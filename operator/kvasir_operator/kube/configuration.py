"""The way to the API server: address, credentials, and the environment's proxy."""

import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import client as aio_client
from kubernetes.aio import config as aio_config

from kvasir_operator.errors import KvasirOperatorError


async def load_configuration(kubeconfig: str | None) -> aio_client.Configuration:
    """Address and credentials: of the file if given, else the pod's own, else of KUBECONFIG or ~/.kube/config.

    Raises KvasirOperatorError when none of them can be read.
    """
    configuration = aio_client.Configuration()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            aio_config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await aio_config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration
            )
    except (aio_config.ConfigException, OSError) as error:
        where = kubeconfig or "a pod's service account, KUBECONFIG or ~/.kube/config"
        raise KvasirOperatorError(f"cannot read the cluster's address and credentials from {where}: {error}") from error
    configuration.proxy = configuration.proxy or proxy_of(configuration.host)
    return configuration


def proxy_of(server: str) -> str | None:
    """What the environment says of the way to a server."""
    address = urlsplit(server)
    # NO_PROXY may name a host with its port, and an IPv6 address without its brackets.
    is_excluded = proxy_bypass(address.netloc) or proxy_bypass(address.hostname or "")
    return None if is_excluded else getproxies().get(address.scheme)
