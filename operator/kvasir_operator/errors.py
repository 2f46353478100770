"""The operator's exceptions: one base, so that `except KvasirOperatorError` at the edge catches all that is ours.

Messages name the thing, what was seen, what was expected and what to do; the cause is chained.

    KvasirOperatorError
      InvalidManifestError      a manifest that the CRD would refuse
        UnknownProfileError     a profile that the installation lacks
      UnreadableManifestError   a file that is missing, not text, or not YAML
      InvalidSettingsError      a flag of `kvasir-operator` with a value that cannot hold
      LocalRunError             `local` cannot start or keep what was asked for
        AddressInUseError       something else listens where a local pod must listen
        PodNeverReadyError      a local pod kept ending before it was ready once
      KubeApiError              the API server refused or did not answer a request
        ObjectNotFoundError     404
          KindNotServedError    404: the API server does not know the kind at all
        ObjectConflictError     409: it exists already, or changed since it was read
        KubeForbiddenError      403: a missing permission, an exceeded quota
          AdmissionFailedError  an admission webhook or policy denied the object, or did not answer
        ObjectRefusedError      400, 413, 422 or another 4xx: the object does not hold
        WatchExpiredError       410: the resource version is too old, list again
        KubeUnavailableError    no answer, or one that says to try again later
          ServerFailedError     500 or another 5xx: the API server failed at this request
      ChildrenRefusedError      the API server refused some of a service's children
      PrometheusError           Prometheus did not answer, or not what the autoscaler needs
      CrdNotInstalledError      the cluster does not know InferenceServices
      LeadershipLostError       another operator may be leading now
"""

from collections.abc import Sequence
from typing import Final


class KvasirOperatorError(Exception):
    """Base of everything that this package raises on purpose."""


def described(error: BaseException) -> str:
    """Another library's error, for a log or a status: its kind and its words.

    Its repr may show a request's headers, and a token among them, as aiohttp's does.
    """
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class InvalidManifestError(KvasirOperatorError):
    """A manifest that does not hold.

    field_path: where, as the manifest spells it (`spec.engine.kvCache.blockSize`).
    """

    def __init__(self, field_path: str, message: str) -> None:
        super().__init__(f"{field_path}: {message}" if field_path else message)
        self.field_path = field_path
        self.reason = message


class UnknownProfileError(InvalidManifestError):
    """A manifest that names a profile which the installation does not have."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        has = f"has {', '.join(known)}" if known else "has none"
        super().__init__(
            "spec.resources.profile",
            f"{name!r}: this installation {has} (chart value profiles): name one, or leave it out",
        )


class UnreadableManifestError(KvasirOperatorError):
    """A manifest file that cannot be opened or is not YAML."""


class InvalidSettingsError(KvasirOperatorError):
    """A setting of the operator itself that is out of bounds."""


class LocalRunError(KvasirOperatorError):
    """`kvasir-operator local` cannot do what the manifest asks for on this machine."""


class AddressInUseError(LocalRunError):
    """An address and port that a local pod needs is taken by another program."""


class PodNeverReadyError(LocalRunError):
    """A local pod ended several times before it was ready once."""


class KubeApiError(KvasirOperatorError):
    """The API server refused a request.

    status: the HTTP status; None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ObjectNotFoundError(KubeApiError):
    """The object, or its kind, is not there."""


class KindNotServedError(ObjectNotFoundError):
    """The kind is not served: its CRD is not installed, or no longer."""


class ObjectConflictError(KubeApiError):
    """The object exists already, or changed since it was read."""


class KubeForbiddenError(KubeApiError):
    """The operator's Role or a quota forbids the request."""


class AdmissionFailedError(KubeForbiddenError):
    """An admission webhook or policy, which the message names, denied the object or failed: the API server is well."""


class ObjectRefusedError(KubeApiError):
    """The API server says that the object does not hold; sending it again would not help."""


class WatchExpiredError(KubeApiError):
    """A watch cannot continue from where it was: list again."""


class KubeUnavailableError(KubeApiError):
    """The API server did not answer, or asked to be left alone for a while."""


class ServerFailedError(KubeUnavailableError):
    """The API server failed at one request. An object may be the cause: a server-side apply of a field that no schema
    knows, of a wrong type or of two entries with one key is answered so."""


# What the API server says of one object: others may be read and written all the same.
OBJECT_ERRORS: Final = (
    KubeForbiddenError,
    ObjectConflictError,
    ObjectNotFoundError,
    ObjectRefusedError,
    ServerFailedError,
)


class ChildrenRefusedError(KvasirOperatorError):
    """The API server refused to create, change or delete children; the pass is tried again."""


class PrometheusError(KvasirOperatorError):
    """Prometheus gave no answer to decide by; replicas stay as they are meanwhile."""


class CrdNotInstalledError(KvasirOperatorError):
    """The cluster does not know the InferenceService kind."""

    def __init__(self, crd_name: str) -> None:
        super().__init__(f"the cluster has no CRD {crd_name}: install it with `kubectl apply -f crds/`")


class LeadershipLostError(KvasirOperatorError):
    """The Lease could not be renewed in time; this process must end at once."""
