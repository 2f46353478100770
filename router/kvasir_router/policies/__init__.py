"""Policies: which of the candidates a request goes to. Each is one file and one pure function of a snapshot."""

from typing import Protocol

from kvasir_router.endpoints.endpoint import EndpointView, Snapshot
from kvasir_router.request import InferenceRequest


class Policy(Protocol):
    def pick(self, request: InferenceRequest, snapshot: Snapshot) -> EndpointView:
        """One of the snapshot's endpoints, of which there is at least one."""
        ...
