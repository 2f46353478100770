"""Learns the engines' tokenizer: one engine of each revision is asked, since its revision decides what it serves.

The newest answer is used. Engines of another make have none to give (404); then there is none, and prompts other than
token ids are matched approximately. Behind a gateway most services may be asked nothing for hours: theirs is learned
when the first prompt wants it, and dropped once none has for a while.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Set
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from kvasir_router.config import ROUTER_SECRET_VARIABLE
from kvasir_router.endpoints.address import Address
from kvasir_router.memory import TEXT_CACHE_BYTES
from kvasir_router.prefix_index.tokens import PieceCache, PromptTokenizer, TokenizerCard, UnusableTokenizerError
from kvasir_router.relay.proxy import ROUTER_SECRET_HEADER

logger = logging.getLogger(__name__)

_NOT_NOW = frozenset({408, 429})
_RETRY_SECONDS = 2.0
_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
_decoder = msgspec.json.Decoder(TokenizerCard)


class Tokenizers:
    """The tokenizers that this process has loaded: one object for all services whose engines have the same.

    A tokenizer lives as long as a service uses it. It is known by its content: an engine's word for it, the digest,
    could be that of another service's.
    """

    def __init__(self, cache_bytes: int = TEXT_CACHE_BYTES) -> None:
        """Of texts and their tokens, of all tokenizers together."""
        self._pieces = PieceCache(cache_bytes)
        self._known: WeakValueDictionary[bytes, PromptTokenizer] = WeakValueDictionary()
        self._loading = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._known)

    async def of(self, card: TokenizerCard) -> PromptTokenizer:
        """Loaded in a thread, one at a time. Raises UnusableTokenizerError."""
        async with self._loading:
            content = await asyncio.to_thread(_digest, card)
            tokenizer = self._known.get(content)
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(PromptTokenizer, card, self._pieces)
                self._known[content] = tokenizer
            return tokenizer


def _digest(card: TokenizerCard) -> bytes:
    return hashlib.sha256(msgspec.json.encode(card, order="sorted")).digest()


class TokenizerSource:
    """`on_tokenizer` gets each tokenizer that differs from the last, and None when it is dropped. Its task runs while
    there is somebody to ask.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        router_secret: str | None,
        tokenizers: Tokenizers,
        on_tokenizer: Callable[[PromptTokenizer | None], None],
        idle_seconds: float | None,
        retry_seconds: float = _RETRY_SECONDS,
    ) -> None:
        """`router_secret` is what engines know the router by. `idle_seconds`: a tokenizer that nobody has wanted for so
        long is dropped; None: it is wanted from the start, for good.
        """
        self._retry_seconds = retry_seconds
        self._session = session
        self._tokenizers = tokenizers
        self._idle_seconds = idle_seconds
        self._is_wanted = idle_seconds is None
        self._last_wanted = 0.0  # of the event loop's clock
        self._idle_timer: asyncio.TimerHandle | None = None
        self._headers = {} if router_secret is None else {ROUTER_SECRET_HEADER: router_secret}
        self._on_tokenizer = on_tokenizer
        self._addresses: frozenset[Address] = frozenset()
        self._known_revisions: set[str] = set()
        self._without: set[Address] = set()  # engines that have none to give
        self._digest: str | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """Nobody is to be asked: every revision's tokenizer is known, or there is none."""
        return self._task is None or self._task.done()

    def follow(self, addresses: Set[Address]) -> None:
        self._addresses = frozenset(addresses)
        self._without &= self._addresses
        self._known_revisions &= {address.revision for address in self._addresses}
        self._begin()

    def want(self) -> None:
        """To be called with every prompt that could be tokenised."""
        if self._idle_seconds is None:
            return
        self._last_wanted = asyncio.get_running_loop().time()
        if not self._is_wanted:
            self._is_wanted = True
            self._drop_later(self._idle_seconds)
            self._begin()

    async def close(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if self.is_done and self._to_ask():
            self._task = asyncio.create_task(self._ask_all(), name="tokenizer source")

    def _drop_later(self, seconds: float) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(seconds, self._drop_if_idle)

    def _drop_if_idle(self) -> None:
        assert self._idle_seconds is not None
        seconds_left = self._last_wanted + self._idle_seconds - asyncio.get_running_loop().time()
        if seconds_left > 0:
            self._drop_later(seconds_left)
            return
        self._is_wanted, self._digest = False, None
        self._known_revisions.clear()
        self._on_tokenizer(None)

    async def _ask_all(self) -> None:
        while True:
            for address in self._to_ask():
                if address.revision not in self._known_revisions:  # nobody else of it has answered meanwhile
                    await self._ask(address)
            if not self._to_ask():
                return
            await asyncio.sleep(self._retry_seconds)

    def _to_ask(self) -> list[Address]:
        if not self._is_wanted:
            return []
        unknown = self._addresses - self._without
        return [address for address in unknown if address.revision not in self._known_revisions]

    async def _ask(self, address: Address) -> None:
        """Once more later where it is not up."""
        try:
            card = await self._fetch(address.url)
            if card is not None:
                await self._use(card, address)
                return
        except (TimeoutError, aiohttp.ClientError, OSError):
            return
        except (msgspec.DecodeError, UnicodeDecodeError, UnusableTokenizerError) as error:
            logger.warning("endpoint %s: its tokenizer cannot be used here: %s", address.url, error)
        self._without.add(address)

    async def _fetch(self, url: str) -> TokenizerCard | None:
        """None: the engine has none to give, or not to this router."""
        async with self._session.get(f"{url}/tokenizer", headers=self._headers, timeout=_TIMEOUT) as response:
            if response.status in (401, 403):
                logger.warning("endpoint %s keeps its tokenizer to another %s", url, ROUTER_SECRET_VARIABLE)
            if 400 <= response.status < 500 and response.status not in _NOT_NOW:
                return None
            response.raise_for_status()
            return _decoder.decode(await response.read())

    async def _use(self, card: TokenizerCard, address: Address) -> None:
        if card.digest != self._digest:
            tokenizer = await self._tokenizers.of(card)
            if not self._is_wanted:
                return
            self._digest = card.digest
            self._on_tokenizer(tokenizer)
            logger.info("endpoint %s has told its tokenizer, digest %s", address.url, card.digest[:12])
        self._known_revisions.add(address.revision)
