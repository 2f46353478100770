"""All bodies that one API process holds together have a size, whoever sends them and however slowly they come.

A body counts from its first byte until its request is answered, since what is made of it is held as long and is no
smaller. The body that would be too much is answered with 503 at once; what still comes of it is not kept.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_runtime.errors import ServerUnavailableError


class BodyBudget:
    """Of one API process."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ServerUnavailableError, and takes nothing, where that is too much."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise ServerUnavailableError(
                f"this server holds {self.num_bytes} bytes of requests and takes no more than {self._max_bytes}; "
                "send the request to another replica, or later"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class BodyBudgetMiddleware:
    """Counts what is received, within the place where errors become answers. What is sent passes it by."""

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_taken = 0

        async def receive_within_budget() -> Message:
            nonlocal num_taken
            message = await receive()
            if num_bytes := len(message.get("body", b"")):
                self._budget.take(num_bytes)
                num_taken += num_bytes
            return message

        try:
            await self._app(scope, receive_within_budget, send)
        finally:
            self._budget.give_back(num_taken)
