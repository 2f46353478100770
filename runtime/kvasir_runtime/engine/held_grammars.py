"""Requests that are held until all ranks have made what follows their grammars, so that no step waits for that."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from kvasir_runtime.requests.add_request import AddRequest
from kvasir_runtime.structured.vocabulary import MAX_KEPT_GRAMMARS

POLL_SECONDS = 0.002
"""How often an engine that has nothing else to do looks whether more has come."""


@dataclass(frozen=True, slots=True)
class _Held:
    message: AddRequest
    preparation: Future[None]


class HeldGrammars:
    def __init__(self, prepare: Callable[[str], Future[None]]) -> None:
        """`prepare` has the ranks make a grammar's matcher; the future ends when all have, or could not."""
        self._prepare = prepare
        self._prepared: OrderedDict[str, Future[None]] = OrderedDict()
        """By the grammars that came last: as many as ranks keep."""
        self._held: dict[str, _Held] = {}

    def __bool__(self) -> bool:
        return bool(self._held)

    def hold(self, message: AddRequest) -> bool:
        """Whether the request has to wait: `take_ready` gives it back."""
        grammar = message.spec.grammar
        if grammar is None or (preparation := self._preparation(grammar)).done():
            return False
        self._held[message.request_id] = _Held(message, preparation)
        return True

    def wait(self, seconds: float) -> bool:
        """For one to be ready, no longer than that; whether any is held."""
        wait([each.preparation for each in self._held.values()], seconds, FIRST_COMPLETED)
        return bool(self._held)

    def take_ready(self) -> list[AddRequest]:
        """In the order in which they came."""
        ready = [each.message for each in self._held.values() if each.preparation.done()]
        for message in ready:
            del self._held[message.request_id]
        return ready

    def take(self, request_id: str) -> list[AddRequest]:
        """That one, whether its grammar is ready or not; nothing where it is not held."""
        held = self._held.pop(request_id, None)
        return [] if held is None else [held.message]

    def take_all(self, api_index: int | None = None) -> list[AddRequest]:
        """Of one API process, whether their grammars are ready or not; None: of all."""
        messages = [each.message for each in self._held.values()]
        wanted = [each for each in messages if api_index is None or each.api_index == api_index]
        return [message for each in wanted for message in self.take(each.request_id)]

    def _preparation(self, grammar: str) -> Future[None]:
        preparation = self._prepared.pop(grammar, None) or self._prepare(grammar)
        self._prepared[grammar] = preparation
        while len(self._prepared) > MAX_KEPT_GRAMMARS:
            self._prepared.popitem(last=False)
        return preparation
