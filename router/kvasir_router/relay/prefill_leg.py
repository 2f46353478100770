"""The prefill half of a request that another engine decodes: asked beside it, and nothing of it reaches the client.

Leaving early closes the connection, which makes the engine abort.
"""

from kvasir_router.errors import UpstreamMalformedError, UpstreamRefusedError
from kvasir_router.relay.proxy import unavailable
from kvasir_router.relay.upstream_answer import UpstreamAnswer
from kvasir_router.relay.upstream_pool import UpstreamPool

_MAX_ANSWER_BYTES = 2**20
"""Of one token and where its KV is."""


async def prefill(pool: UpstreamPool, url: str, path: str, headers: bytes, body: bytes) -> bytes:
    """The engine's answer, once it has computed the prompt. Raises UpstreamError, RequestTimeoutError."""
    answer = await pool.post(url, path.encode("latin-1"), headers, [body])
    try:
        _check(answer)
        return await _whole(answer)
    finally:
        answer.close()


def _check(answer: UpstreamAnswer) -> None:
    if answer.status >= 500:
        raise unavailable(answer)
    if answer.status != 200:
        reason = str(answer.status)
        raise UpstreamRefusedError(f"{answer.url} does not prefill this request: {reason}", reason)


async def _whole(answer: UpstreamAnswer) -> bytes:
    received = bytearray()

    def take(chunk: bytes) -> None:
        if len(received) <= _MAX_ANSWER_BYTES:
            received.extend(chunk)

    await answer.relay(take)
    if len(received) > _MAX_ANSWER_BYTES:
        raise UpstreamMalformedError(
            f"{answer.url} answered a prefill with more than {_MAX_ANSWER_BYTES} bytes", "malformed"
        )
    return bytes(received)
