"""Errors of the runtime. Every message names the thing, what was seen, what was expected and what to do.

KvasirRuntimeError
+-- ConfigurationError          a flag or a combination of flags that cannot work
+-- ModelLoadError              the model folder cannot be served
|   +-- UnknownArchitectureError
|   +-- CheckpointError         a tensor is missing, left over or of the wrong shape
+-- KernelBuildError            (kernels/build.py) the C++ compiler refuses the CPU kernels
+-- InvalidRequestError         one request is wrong; only its sender hears of it
|   +-- ContextLengthError
|   +-- RequestTooLargeError
|   +-- GrammarError            what an answer is to follow is no grammar, or takes too much work
+-- RequestFailedError          the engine gave up on one request; others go on
+-- KvTransferError             KV blocks cannot be exchanged with another engine
+-- StepSkippedError            a step behind a failed one was not computed; its requests are planned again
+-- StageFailedError            a pipeline stage could not compute a step; its requests fail, others go on
+-- ServerUnavailableError      the server takes no requests now: it is loading or draining
|   +-- RequestMovedError       a stream goes on in another engine
+-- CollectiveFailedError       ranks could not exchange data; mostly another rank has ended
+-- RankFailedError             a rank has ended, hangs or could not start; its whole group ends with it
+-- EngineDeadError             the engine core has gone; nothing can be served any more
+-- FetchError                  a model could not be downloaded
    +-- ModelNotFoundError, ModelAccessDeniedError, ModelCorruptError, DiskFullError, CacheUnavailableError
    +-- TransientFetchError     the same may work when it is tried again
        +-- DownloadStalledError, SourceUnreachableError
"""

from typing import ClassVar


class KvasirRuntimeError(Exception):
    """Base of all errors that the runtime raises on purpose."""


class ConfigurationError(KvasirRuntimeError):
    """A flag, or a combination of flags, that cannot work."""


class ModelLoadError(KvasirRuntimeError):
    """The model folder cannot be served."""


class UnknownArchitectureError(ModelLoadError):
    """config.json names an architecture that the runtime has no family for."""


class CheckpointError(ModelLoadError):
    """The safetensors files do not hold what the configuration promises."""


class InvalidRequestError(KvasirRuntimeError):
    """A request that can never be served. `param` is the field at fault, as OpenAI's error objects name it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit into the model's context."""


class GrammarError(InvalidRequestError):
    """What an answer is to follow is no grammar, or takes more work than the limits allow."""


class RequestTooLargeError(InvalidRequestError):
    """Computing the request takes more than the engine has, however little else it does."""


class RequestFailedError(KvasirRuntimeError):
    """The engine gave up on one request; others go on."""


class KvTransferError(KvasirRuntimeError):
    """KV blocks cannot be exchanged with another engine; their prompts can be computed."""


class StepSkippedError(KvasirRuntimeError):
    """A step that was queued behind a failed one, and was not computed."""


class StageFailedError(KvasirRuntimeError):
    """A pipeline stage could not compute a step; its requests fail, others are planned again."""


class ServerUnavailableError(KvasirRuntimeError):
    """The server takes no requests now, because it is loading or draining; another replica may."""


class EngineAsleepError(ServerUnavailableError):
    """The engine's memory is others' until it is woken."""

    def __init__(self, level: int) -> None:
        super().__init__(
            f"this engine sleeps at level {level} and answers nothing; POST /wake_up wakes it. Send the request to "
            "another replica, or later"
        )


class RequestMovedError(ServerUnavailableError):
    """A stream goes on in another engine, which finds its KV blocks here."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        """Of the side channel, and under which key the blocks are kept there; None: they are not."""
        super().__init__("this server hands its requests over; send it to another replica")
        self.host = host
        self.port = port
        self.key = key


class CollectiveFailedError(KvasirRuntimeError):
    """Ranks could not exchange data. Mostly another rank has ended, which is then told as the cause."""


class RankFailedError(KvasirRuntimeError):
    """A rank has ended, hangs or could not start, and its whole group ends with it."""


class EngineDeadError(KvasirRuntimeError):
    """The engine core has gone; requests in flight are lost and none can be added."""


class FetchError(KvasirRuntimeError):
    """A model could not be downloaded. `reason` is what the operator shows as the reason of a condition."""

    reason: ClassVar[str]

    @property
    def last_words(self) -> str:
        """Of the container, on one line: the operator reads the reason from it."""
        return f"kvasir-runtime: error: {self.reason}: {' '.join(str(self).split())}\n"


class ModelNotFoundError(FetchError):
    """The source has no such model, revision, bucket or prefix, or nothing there that can be served."""

    reason = "ModelNotFound"


class ModelAccessDeniedError(FetchError):
    """A gated model, a bucket of others, or credentials that are wrong or missing."""

    reason = "ModelAccessDenied"


class ModelCorruptError(FetchError):
    """What came is not what the source says that it has."""

    reason = "ModelCorrupt"


class DiskFullError(FetchError):
    """The cache has no room for the model."""

    reason = "DiskFull"


class CacheUnavailableError(FetchError):
    """The cache's folder cannot be written or locked."""

    reason = "CacheUnavailable"


class TransientFetchError(FetchError):
    """The same may work when it is tried again."""


class DownloadStalledError(TransientFetchError):
    """No byte came for long."""

    reason = "DownloadStalled"


class SourceUnreachableError(TransientFetchError):
    """The source cannot be reached, or answers that it cannot serve now."""

    reason = "SourceUnreachable"
