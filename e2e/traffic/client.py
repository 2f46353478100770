"""Streams answers without pause and checks each against what the model gives, a completion token by token.

    python client.py PLAN.json      until SIGTERM, after which the streams under way still end

It runs in a pod of the router's image, so it needs nothing but aiohttp. Every stream becomes one JSON line on stdout
(`Outcome` in traffic.py). Nothing is tried twice: what a client without retries would see is what counts.
"""

import asyncio
import itertools
import json
import signal
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

SILENCE_SECONDS = 90.0
"""A stream that is silent for longer counts as cut."""
LAST_EVENTS = ("response.completed", "message_stop")
"""Where no [DONE] follows: of Responses and Messages."""


class RefusedError(Exception):
    """No stream began."""


class CutError(Exception):
    """The stream ended before its time."""


class WrongError(Exception):
    """A token, its number, or the text is not what the model gives."""


class Stream(ABC):
    """One answer, by whichever API."""

    def __init__(self, expected: dict[str, Any], cache_salt: str | None = None) -> None:
        self.expected = expected
        self.cache_salt = cache_salt
        self.started = time.time()
        self.arrivals: list[float] = []
        self.num_tokens = 0
        self.text = ""

    async def run(self, session: aiohttp.ClientSession, url: str, model: str) -> str:
        """How it ended: whole, refused, cut or wrong, with the reason after a colon."""
        try:
            await self._run(session, url, model)
        except RefusedError as error:
            return f"refused: {error}"
        except (CutError, aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{'cut' if self.arrivals else 'refused'}: {error!r} after {self.num_tokens} tokens"
        except WrongError as error:
            return f"wrong: {error}"
        return "whole"

    async def _run(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        path, body = self._request()
        body |= {"model": model, "temperature": 0, "stream": True}
        if self.cache_salt is not None:
            body["cache_salt"] = self.cache_salt
        async with session.post(f"{url}/{path}", json=body) as response:
            if response.status != 200:
                raise RefusedError(f"status {response.status}: {(await response.text())[:300]}")
            async for data in events(response):
                if data == "[DONE]":
                    return self._check_end()
                event = json.loads(data)
                if "error" in event:
                    raise CutError(json.dumps(event["error"])[:300])
                self.arrivals.append(time.time())
                self._take(event)
                if event.get("type") in LAST_EVENTS:
                    return self._check_end()
        raise CutError("the last event is missing")

    @abstractmethod
    def _request(self) -> tuple[str, dict[str, Any]]:
        """The path behind the API's URL, and the body; of it, the model and how it is sampled and sent are added."""

    @abstractmethod
    def _take(self, event: dict[str, Any]) -> None: ...

    @abstractmethod
    def _check_end(self) -> None: ...

    def report(self, ended_as: str) -> str:
        outcome, _, detail = ended_as.partition(": ")
        times = [self.started, *self.arrivals]
        gaps = [after - before for before, after in itertools.pairwise(self.arrivals)]
        fields = {
            "outcome": outcome,
            "detail": detail,
            "started": self.started,
            "ended": times[-1] if outcome == "whole" else time.time(),
            "num_tokens": self.num_tokens,
            "first_token_seconds": self.arrivals[0] - self.started if self.arrivals else None,
            "longest_gap_seconds": max(gaps, default=None),
        }
        return json.dumps(fields)


class Completion(Stream):
    """`expected` has an Answer's fields (answers.py)."""

    finish_reason: str | None = None

    def _request(self) -> tuple[str, dict[str, Any]]:
        body = {
            "prompt": self.expected["prompt_token_ids"],
            "max_tokens": len(self.expected["token_ids"]),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        return "completions", body

    def _take(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            self._take_tokens(choice.get("token_ids") or [])
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if event["usage"]["completion_tokens"] != self.num_tokens:
            raise WrongError(f"usage counts {event['usage']['completion_tokens']} tokens, {self.num_tokens} came")

    def _take_tokens(self, token_ids: list[int]) -> None:
        end = self.num_tokens + len(token_ids)
        if token_ids != self.expected["token_ids"][self.num_tokens : end]:
            raise WrongError(f"tokens from number {self.num_tokens} are {token_ids[:8]}")
        self.num_tokens = end

    def _check_end(self) -> None:
        if self.num_tokens != len(self.expected["token_ids"]) or self.finish_reason != "length":
            raise WrongError(f"ended with {self.finish_reason} after {self.num_tokens} tokens")
        if self.text != self.expected["text"]:
            raise WrongError(f"the text is {self.text[:200]!r}...")


class JsonAnswer(Stream):
    """Text or arguments of a call that are JSON; `expected` has a JsonRequest's fields (json_requests.py)."""

    answer_id: str | None = None

    def _request(self) -> tuple[str, dict[str, Any]]:
        return self.expected["path"], dict(self.expected["body"])

    def _take(self, event: dict[str, Any]) -> None:
        number, answer_id = len(self.arrivals) - 1, event.get("id")
        if event.get("sequence_number", number) != number:
            raise WrongError(f"event {number} has number {event['sequence_number']}")
        if answer_id not in (None, self.answer_id or answer_id):
            raise WrongError(f"event {number} is of {answer_id}, those before it of {self.answer_id}")
        self.answer_id = answer_id
        piece = said(event)
        self.num_tokens += bool(piece)
        self.text += piece

    def _check_end(self) -> None:
        try:
            answer = json.loads(self.text)
        except ValueError as error:
            raise WrongError(f"the text is no JSON ({error}): {self.text[-200:]!r}") from error
        if answer != self.expected["answer"]:
            raise WrongError(f"the answer is {self.text[:200]!r}...")


def said(event: dict[str, Any]) -> str:
    """What an event of Chat Completions, Responses or Messages adds to the one text or call of an answer."""
    pieces = []
    for delta in (choice["delta"] for choice in event.get("choices", ())):
        pieces.append(delta.get("content") or "")
        pieces += [call["function"]["arguments"] for call in delta.get("tool_calls") or ()]
    if event.get("type") == "response.output_text.delta":
        pieces.append(event["delta"])
    if event.get("type") == "content_block_delta":
        pieces.append(event["delta"]["partial_json"])
    return "".join(pieces)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event; one that the end of the answer cuts is not an event."""
    rest = b""
    async for data in response.content.iter_any():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            lines = [line.removeprefix(b"data:").strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines).decode()


async def client(session: aiohttp.ClientSession, plan: dict[str, Any], number: int, stop: asyncio.Event) -> None:
    for turn in itertools.count(number):
        if stop.is_set():
            return
        cache_salt = uuid.uuid4().hex if plan["is_salted"] else None
        expected = plan["streams"][turn % len(plan["streams"])]
        while expected is not None:
            stream = (Completion if "token_ids" in expected else JsonAnswer)(expected, cache_salt)
            ended_as = await stream.run(session, plan["url"], plan["model"])
            print(stream.report(ended_as), flush=True)
            if ended_as != "whole":
                await asyncio.sleep(0.1)  # a refusal takes no time: do not fill the log with thousands
            expected = expected["next_turn"]


async def main(plan: dict[str, Any]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
    # A Service keeps its address: asked for once, so that what is judged is not the cluster's DNS.
    connector = aiohttp.TCPConnector(ttl_dns_cache=None)
    session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=plan["headers"])
    async with session, asyncio.TaskGroup() as group:
        for number in range(plan["num_clients"]):
            group.create_task(client(session, plan, number, stop))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
