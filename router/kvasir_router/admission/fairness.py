"""Whose turn it is among the tenants that wait: deficit round robin, counted in tokens.

As in FQ-CoDel (RFC 8290, section 4.2): a tenant is served while it has credit and its last request may overdraw it, so
that no request is too large; whoever comes anew goes first. A debt outlives the tenant's stay in the queue as long as
anybody waits: nobody gains by sending one request at a time. Pure bookkeeping, without clock.
"""

from collections import OrderedDict
from collections.abc import Callable

# What a tenant may start in one turn. A small one interleaves tenants finely, at no cost: turns in which nobody could
# start anything are passed in one step.
QUANTUM_TOKENS = 1024


class DeficitRoundRobin:
    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._credits: OrderedDict[str, int] = OrderedDict()  # tokens of tenants that wait or owe, by turn
        self._waiting: set[str] = set()

    def join(self, tenant: str) -> None:
        """It waits now. May be repeated."""
        self._waiting.add(tenant)
        if tenant not in self._credits:
            self._credits[tenant] = self._quantum_tokens
            self._credits.move_to_end(tenant, last=False)

    def leave(self, tenant: str) -> None:
        """Nothing of it waits any more. May be repeated."""
        self._waiting.discard(tenant)
        if not self._waiting:
            self._credits.clear()
        elif self._credits.get(tenant, 0) > 0:
            del self._credits[tenant]

    def next(self, can_start: Callable[[str], bool]) -> str | None:
        """Whose turn it is among those that can start something; None where nobody can.

        Who has credit stands before all that have none, so that the search mostly ends at once.
        """
        debtors = []
        for tenant, credit in self._credits.items():
            if can_start(tenant):
                if credit > 0:
                    return tenant
                debtors.append(tenant)
        return min(debtors, key=self._num_turns_to_credit, default=None)  # the first of those with the fewest

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A request of a tenant that waits has started."""
        num_turns = self._num_turns_to_credit(tenant)
        if num_turns:
            self._pass_turns(num_turns)
        self._credits[tenant] -= num_tokens
        if self._credits[tenant] <= 0:
            self._credits.move_to_end(tenant)

    def _num_turns_to_credit(self, tenant: str) -> int:
        credit = self._credits[tenant]
        return 0 if credit > 0 else -credit // self._quantum_tokens + 1

    def _pass_turns(self, num_turns: int) -> None:
        """Debts shrink, and nobody saves up more than one turn's credit."""
        for tenant, credit in list(self._credits.items()):
            self._credits[tenant] = min(credit + num_turns * self._quantum_tokens, self._quantum_tokens)
            if self._credits[tenant] > 0 and tenant not in self._waiting:
                del self._credits[tenant]
