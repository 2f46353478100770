"""Whether fetching a cached prefix from a peer beats computing it: pure arithmetic on measured rates."""

ASKING_SECONDS = 0.002
"""From the claim to the first byte, and for the agent to notice the last: a few polls of a millisecond."""

GRACE_SECONDS = 1.0
UNMEASURED_SECONDS = 4.0
"""Of a prefill whose rate is not known."""


def patience_seconds(num_tokens: int, tokens_per_second: float | None) -> float:
    """How long a lookup may take before the prompt is computed here."""
    return GRACE_SECONDS + (UNMEASURED_SECONDS if tokens_per_second is None else num_tokens / tokens_per_second)


def is_worth_pulling(
    num_tokens: int, num_bytes: int, *, tokens_per_second: float | None, bytes_per_second: float | None
) -> bool:
    """A rate that was not measured yet is found out by pulling."""
    if tokens_per_second is None or bytes_per_second is None:
        return True
    return ASKING_SECONDS + num_bytes / bytes_per_second < num_tokens / tokens_per_second
