"""Prefixes that requests have asked for: which of them more than one wants, and what not having a copy has cost.

A prefix is the last matched block. The turns of one conversation each match another, so a match that nobody had asked
for before is a conversation that goes on, and one that somebody had is a document or a system prompt that many share.
"""

from collections import OrderedDict

# Of prefixes that are asked for, the latest: one of which nobody speaks any more has nothing to lose.
_MAX_PREFIXES = 4096
# The newest request in the share of all that go on.
_REQUEST_SHARE = 0.01
# Of the price of a copy: as likely as not others will lose the rest, so who loses so much alone does not wait for them.
_PAID_ALONE = 0.5


class AskedPrefixes:
    """`returning_share`: of the latest requests, those that go on with a conversation."""

    def __init__(self) -> None:
        self.returning_share = 0.0
        self._losses: OrderedDict[int, float] = OrderedDict()  # seconds since it was computed last, by its name

    def ask(self, prefix: int | None) -> bool:
        """By a request that matches it, None: nothing. Whether one has before; from now on one has."""
        is_known = prefix in self._losses
        is_returning = prefix is not None and not is_known
        self.returning_share += _REQUEST_SHARE * (is_returning - self.returning_share)
        if prefix is not None and not is_known:
            self._losses[prefix] = 0.0
            if len(self._losses) > _MAX_PREFIXES:
                self._losses.popitem(last=False)
        return is_known

    def is_paid(self, prefix: int, loss: float, price: float) -> bool:
        """Adds the loss; whether that makes the price of a copy, which is then taken."""
        total = self._losses.pop(prefix, 0.0) + loss
        is_paid = total >= price or loss >= _PAID_ALONE * price
        self._losses[prefix] = 0.0 if is_paid else total
        return is_paid
