"""The index of a service whose engines publish KV events: all of them, or some, or with gaps for a while.

An endpoint is judged by its events. Where they do not tell all that it holds (none come, some were lost, the beginning
is not known), or a prompt cannot be tokenised here, the approximate index is asked too, and the longer match counts.

A text is tokenised as far as somebody has it cached: behind the first block that nobody has, none can count. How many
tokens the rest has is estimated. What was just sent somewhere is expected there until events had time to tell, and is
known by its bytes.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import msgspec

from kvasir_router.dialects.dialect import ABSENT, Prompt
from kvasir_router.prefix_index.approximate import ApproximatePrefixIndex
from kvasir_router.prefix_index.block_keys import TOKEN_BYTES, PromptKeys
from kvasir_router.prefix_index.index import Held, PrefixKey, SharedPrefix
from kvasir_router.prefix_index.kv_events import extra_key
from kvasir_router.prefix_index.precise import Chains, PreciseIndex
from kvasir_router.prefix_index.tokens import CHUNK_CHARACTERS, Chunk, PromptTokenizer

Result = TypeVar("Result")

INLINE_BYTES = 1024
"""Of a prompt: a smaller one is done on the event loop, in less than a millisecond."""
_NUM_THREADS = 2
JUST_SENT_SECONDS = 4.0
"""Until events have told of what was sent."""


class Threads:
    """Where long prompts are tokenised and hashed. At most `max_long_prompts` are being done or wait. Close it last."""

    def __init__(self, max_long_prompts: int = 32) -> None:
        self._executor = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="prompt")
        self._places = threading.Semaphore(max_long_prompts)
        self.num_refused = 0

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result | None:
        """None, and not done, where too many long prompts wait: a guess at once is better than the truth too late."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if not self._places.acquire(blocking=False):
            self.num_refused += 1
            return None
        future = self._executor.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class MixedKey(SharedPrefix, frozen=True):
    num_tokens: int  # exact where `chains` is there, but where the text is cut
    approximate: PrefixKey
    chains: Chains | None  # None: which tokens the prompt has is not known

    def beginning(self, num_tokens: int) -> int | None:
        for block_size, keys in (self.chains or {}).items():
            if num_tokens % block_size == 0 and block_size <= num_tokens <= len(keys) * block_size:
                return keys[num_tokens // block_size - 1]
        return self.approximate.beginning(num_tokens) if isinstance(self.approximate, SharedPrefix) else None


@dataclass(eq=False)
class MixedIndex:
    """`on_withdrawn` is told of an endpoint whose cache is said to be void, so that its events are learned anew, and
    `on_text` of every prompt that a tokenizer is wanted for.

    `base_models` are what engines serve without an adapter; where none is known, every model is taken for one.
    """

    approximate: ApproximatePrefixIndex
    precise: PreciseIndex
    threads: Threads
    base_models: Callable[[], frozenset[str]]
    on_withdrawn: Callable[[str], None]
    on_text: Callable[[], None] = lambda: None
    _tokenizer: PromptTokenizer | None = field(default=None, init=False)  # the engines' own, once one has told

    def __post_init__(self) -> None:
        self._just_sent = self.approximate.of_the_last(JUST_SENT_SECONDS)  # where events tell all

    def use_tokenizer(self, tokenizer: PromptTokenizer | None) -> None:
        self._tokenizer = tokenizer

    async def key(self, prompt: Prompt) -> MixedKey:
        approximate = await self.approximate.key(prompt)
        if not prompt.is_token_ids:
            self.on_text()
        if prompt.is_token_ids or self._tokenizer is not None:
            found = await self.threads.run(len(prompt.content), partial(self._key, prompt, approximate))
            if found is not None:
                return found
        return MixedKey(approximate.num_tokens, approximate, None)

    def match(self, key: PrefixKey, now: float) -> Mapping[str, int]:
        mixed = cast(MixedKey, key)
        matched = {url: held.num_tokens for url, held in self.written(key).items()}
        for url, num_tokens in self.approximate.match(mixed.approximate, now).items():
            if not self._is_told(url, mixed):
                matched[url] = max(matched.get(url, 0), min(num_tokens, mixed.num_tokens))
        share = mixed.num_tokens / max(mixed.approximate.num_tokens, 1)
        for url, num_tokens in self._just_sent.match(mixed.approximate, now).items():
            matched[url] = max(matched.get(url, 0), min(int(num_tokens * share), mixed.num_tokens))
        return matched

    def written(self, key: PrefixKey) -> Mapping[str, Held]:
        mixed = cast(MixedKey, key)
        return {} if mixed.chains is None else self.precise.match(mixed.chains)

    def insert(self, url: str, key: PrefixKey, now: float, capacity_tokens: int | None) -> None:
        mixed = cast(MixedKey, key)
        index = self._just_sent if self._is_told(url, mixed) else self.approximate
        index.insert(url, mixed.approximate, now, capacity_tokens)

    def withdraw(self, url: str, key: PrefixKey | None = None) -> None:
        if key is None:
            self.approximate.withdraw(url)
            self._just_sent.withdraw(url)
            self.on_withdrawn(url)
            return
        mixed = cast(MixedKey, key)
        self.approximate.withdraw(url, mixed.approximate)
        self._just_sent.withdraw(url, mixed.approximate)

    def expire(self, now: float) -> None:
        self.approximate.expire(now)
        self._just_sent.expire(now)
        self.precise.expire(now)

    def num_blocks(self, url: str) -> int:
        if self.precise.is_complete(url):
            return self.precise.num_blocks(url)
        return max(self.precise.num_blocks(url), self.approximate.num_blocks(url))

    def _is_told(self, url: str, key: MixedKey) -> bool:
        """Events say all about this prompt on this endpoint."""
        return key.chains is not None and self.precise.is_complete(url)

    def _key(self, prompt: Prompt, approximate: PrefixKey) -> MixedKey | None:
        """In a thread where the prompt is long: of what changes meanwhile it asks for single blocks only."""
        if prompt.is_token_ids:
            chunks: Iterator[Chunk] | None = iter([Chunk(prompt.content)])
        else:
            chunks = None if self._tokenizer is None else self._tokenizer.chunks(prompt)
        if chunks is None:
            return None
        adapter, salt = _adapter(prompt.model, self.base_models()), _salt_key(prompt.cache_salt)
        known = [PromptKeys(block_size, adapter, salt) for block_size in self.precise.block_sizes()]
        num_bytes, share = 0, 1.0
        for chunk in chunks:
            num_bytes, share = num_bytes + len(chunk.tokens), chunk.share
            for keys in known:
                keys.extend(chunk.tokens)
            if chunk.num_left > CHUNK_CHARACTERS and not any(map(self._may_go_on, known)):
                break
        num_tokens = int(num_bytes // TOKEN_BYTES / share)
        return MixedKey(num_tokens, approximate, {keys.block_size: keys.keys for keys in known})

    def _may_go_on(self, known: PromptKeys) -> bool:
        return not known.keys or self.precise.is_held(known.keys[-1])


def _salt_key(raw: msgspec.Raw) -> bytes:
    """As an engine's events have it; one that is no text is the engine's to refuse."""
    if raw is ABSENT:
        return b""
    try:
        salt = msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError:
        return b""
    return extra_key((salt,)) if salt else b""


def _adapter(model: str | None, base_models: frozenset[str]) -> bytes:
    """Its name, as engines' events have it; nothing for the model itself."""
    return b"" if model is None or not base_models or model in base_models else model.encode()
