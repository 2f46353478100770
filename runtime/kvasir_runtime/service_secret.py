"""The secret that a service's router and engines are started with, and the keys by which engines and ranks let in only
one another over the network: those of ZMQ's CURVE, which also encrypts.

CURVE lets in whoever knows the listening side's public key. Ours is derived from the secret, as the private one is, and
shown to nobody: to know it is to know the secret. Without a secret everybody is let in.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

SECRET_VARIABLE = "KVASIR_ROUTER_SECRET"
_PURPOSE = b"kvasir CURVE 1"
"""So that the private key tells nothing of the secret, which the router also shows as a header."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One pair for all processes of a service, in ZMQ's printable form (Z85)."""

    public: bytes = field(repr=False)
    private: bytes = field(repr=False)


def service_secret(environment: Mapping[str, str]) -> str | None:
    """None where nothing is set."""
    return environment.get(SECRET_VARIABLE) or None


def curve_keys(environment: Mapping[str, str]) -> CurveKeys | None:
    """None where no secret is set."""
    secret = service_secret(environment)
    if secret is None:
        return None
    private = z85.encode(hmac.digest(secret.encode(), _PURPOSE, "sha256"))
    return CurveKeys(zmq.curve_public(private), private)


def guard(listening: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Let in only who has the keys; before the socket is bound."""
    if keys is not None:
        listening.setsockopt(zmq.CURVE_SERVER, 1)
        listening.setsockopt(zmq.CURVE_SECRETKEY, keys.private)


def identify(connecting: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Be let in by who has the keys, and talk to nobody else; before the socket is connected."""
    if keys is not None:
        connecting.setsockopt(zmq.CURVE_SERVERKEY, keys.public)
        connecting.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        connecting.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
