"""Requests to the cluster's API server, with the standard library alone."""

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from e2e.cluster.rig.layout import API_CERTIFICATE, API_PORT, RELAY_ADDRESS

OUTSIDE = f"https://{RELAY_ADDRESS}:{API_PORT}"
"""The relay's address, which the API server's certificate does not name."""


def is_ready(server: str) -> bool:
    """Whoever answers: its certificate may not be written yet."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{server}/readyz", timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def get_items(server: str, path: str, token: str) -> list[dict[str, Any]]:
    """A list's items; empty when the API server lacks the kind. The server's certificate names its address."""
    request = urllib.request.Request(server + path, headers={"Authorization": f"Bearer {token}"})
    context = ssl.create_default_context(cafile=str(API_CERTIFICATE))
    try:
        with urllib.request.urlopen(request, timeout=5, context=context) as answer:
            items: list[dict[str, Any]] = json.load(answer)["items"]
            return items
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
