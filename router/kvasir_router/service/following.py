"""Following engines by what they publish: what one service needs for it, and what all services share.

Imports ZMQ and the tokenizers library, 160 ms and 9 MB: only a router that was told --kv-events does.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import aiohttp
import zmq

from kvasir_router.config import KvEventPorts
from kvasir_router.endpoints.address import Address
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.prefix_index.mixed import MixedIndex, Threads
from kvasir_router.prefix_index.precise import BlockBudget, PreciseIndex
from kvasir_router.prefix_index.subscriber import Context
from kvasir_router.service.event_feed import EventFeed
from kvasir_router.service.load_report import LoadReport
from kvasir_router.service.registry import Registry
from kvasir_router.service.tokenizer_source import Tokenizers, TokenizerSource


@dataclass(frozen=True)
class Following:
    """Of one service, from its making to `close`, on one event loop."""

    feed: EventFeed
    tokenizers: TokenizerSource
    index: MixedIndex

    def follow(self, addresses: Set[Address]) -> None:
        self.feed.follow(addresses)
        self.tokenizers.follow(addresses)

    def describe(self, url: str) -> dict[str, Any] | None:
        """For /endpoints."""
        return self.feed.describe(url)

    async def close(self) -> None:
        self.feed.close()
        await self.tokenizers.close()


class FollowingFactory:
    """What all services share: ZMQ's I/O thread, the threads in which long prompts are tokenised, tokenizers, and the
    bound on the blocks that are remembered.
    """

    def __init__(
        self,
        ports: KvEventPorts,
        max_blocks: int,
        session: aiohttp.ClientSession,
        clock: Callable[[], float],
        tokenizer_idle_seconds: float | None,
        tokenizers: Tokenizers | None = None,
        context: Context | None = None,
    ) -> None:
        """`session` asks engines for their tokenizer; its owner closes it. `tokenizer_idle_seconds`: see
        TokenizerSource. `context`, if given, is this factory's to close.
        """
        self._ports = ports
        self._blocks = BlockBudget(max_blocks)
        self._tokenizers = Tokenizers() if tokenizers is None else tokenizers
        self._tokenizer_idle_seconds = tokenizer_idle_seconds
        self._session = session
        self._clock = clock
        self._context: Context = context or zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # four a rank; 1023 are the default
        self._threads = Threads()

    def create(
        self,
        approximate: ApproximatePrefixIndex,
        registry: Registry,
        router_secret: str | None,
        on_room: Callable[[], None],
    ) -> Following:
        """`on_room` is called when an endpoint may have less ahead than before."""

        def report(url: str, report: LoadReport) -> None:
            if (endpoint := registry.get(url)) is not None:
                endpoint.load.report(report, self._clock())
                on_room()

        precise = PreciseIndex(self._blocks)
        feed = EventFeed(self._ports, precise, report, self._context, self._clock)
        index = MixedIndex(
            approximate, precise, self._threads, lambda: registry.own_models, feed.resync, lambda: source.want()
        )
        source = TokenizerSource(
            self._session, router_secret, self._tokenizers, index.use_tokenizer, self._tokenizer_idle_seconds
        )
        return Following(feed, source, index)

    def close(self) -> None:
        """After all that it has made."""
        self._threads.close()
        self._context.destroy(linger=0)
