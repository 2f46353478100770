"""How long decode engines wait for KV once its prefill has ended, learned by pair of engines.

Seconds from the prefill engine's answer to the decode engine's first byte: what remains of the transfer behind its
overlap with prefill, and the first step. Both are seen by this router, so no engine has to tell. Fitted as prefills are
(see prefill_rate), in tokens: a token's bytes are the same for all engines of a revision. A pair whose transfers fail
looks slow, since its decode engine then computes the prompt, and is avoided until that is forgotten.
"""

from collections.abc import Set

from kvasir_router.service.prefill_rate import FleetPrefill, PrefillRate

# Before anybody has observed anything: 128 KiB a token, as of a model of 8B, at 6 GB/s.
_PRIOR_TOKENS_PER_SECOND = 50_000.0
# Networks and side channels change faster than engines: what prefill rates forget in a minute is forgotten in 15 s.
_AGEING = 4.0


class TransferTimes:
    """Of one service. A pair without observations is taken to be as its fleet's median."""

    def __init__(self) -> None:
        self._fleet = FleetPrefill(_PRIOR_TOKENS_PER_SECOND)
        self._unknown = self._fleet.new_member()
        self._pairs: dict[tuple[str, str], PrefillRate] = {}

    def estimate_seconds(self, prefill_url: str, decode_url: str, num_tokens: int) -> float:
        return self._pairs.get((prefill_url, decode_url), self._unknown).estimate_seconds(num_tokens)

    def observe(self, prefill_url: str, decode_url: str, num_tokens: int, seconds: float, now: float) -> None:
        pair = self._pairs.get((prefill_url, decode_url))
        if pair is None:
            pair = self._pairs[prefill_url, decode_url] = self._fleet.new_member()
        pair.observe(num_tokens, seconds, now * _AGEING)

    def refresh(self, urls: Set[str], now: float) -> None:
        """To be called now and then. `urls` are the endpoints that there are: pairs of others are forgotten."""
        self._pairs = {pair: rate for pair, rate in self._pairs.items() if urls >= set(pair)}
        self._fleet.refresh(now * _AGEING)
