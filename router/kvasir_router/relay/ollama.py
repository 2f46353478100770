"""Ollama's /api/chat and /api/generate around chat: requests in chat's words, and what streams in chat's words as lines
of JSON, or as one answer.

To whoever relays, the stream is chat's, with its journal, its end and its errors, so it goes on in another engine as
chat's does. It is a stream there even where the client wants it whole.
"""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvasir_chat.messages import ConversationRefusedError
from kvasir_chat.ollama import chat_request, only_loads
from kvasir_router.dialects.dialect import is_too_much
from kvasir_router.errors import BodyTooLargeError, MalformedRequestError
from kvasir_router.relay.exchange import ResponseWriter
from kvasir_router.relay.headers import RawHeaders

Json = dict[str, Any]
PATHS: Mapping[str, str] = dict.fromkeys(("/api/chat", "/api/generate"), "/v1/chat/completions")
"""And what is asked of engines."""
_REPLACED = frozenset({b"content-type", b"content-length"})
_EVENT = b"data: {"


class OllamaWriter(ResponseWriter):
    """One request's: its body is translated, then the pieces of its answer, which are chat's, are written to it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun_at = time.perf_counter_ns()
        self._first_at: int | None = None
        self._model: Any = None
        self._is_chat = True
        self._is_whole = False
        self._only_loads = False
        self._status = 200
        self._headers: list[tuple[bytes, bytes]] = []
        self._rest = b""  # of a line, or an error that is no stream
        self._calls: dict[int, Json] = {}
        self._said: dict[str, list[Any]] = {"content": []}  # of a whole answer, by piece
        self._finish_reason: str | None = None
        self._usage: Mapping[str, int] = {}
        self._error: Json | None = None

    def translated(self, body: bytes) -> bytes:
        """Raises MalformedRequestError (400) and BodyTooLargeError (413)."""
        if is_too_much(body):
            raise BodyTooLargeError("the request has too many values; /v1/chat/completions takes more of them")
        try:
            asked = msgspec.json.decode(body, type=Json)
            self._model, self._is_chat = asked.get("model"), "messages" in asked
            self._is_whole, self._only_loads = asked.get("stream") is False, only_loads(asked)
            return msgspec.json.encode(chat_request(asked))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise MalformedRequestError(f"the request body is not a JSON object: {error}") from error
        except ConversationRefusedError as error:
            raise MalformedRequestError(str(error), param=error.field) from error

    def start(self, status: int, headers: RawHeaders) -> None:
        self._status, self._headers = status, [header for header in headers if header[0] not in _REPLACED]
        self._is_whole |= status != 200
        self.has_started = True
        if not self._is_whole:
            super().start(status, [*self._headers, (b"content-type", b"application/x-ndjson")])

    def write(self, body: bytes) -> None:
        self._rest += body
        if self._status == 200:
            *lines, self._rest = self._rest.split(b"\n")
            self._tell([piece for line in lines if line.startswith(_EVENT) for piece in self._read(line[5:])])
        self.last = body  # whether that was chat's last is asked

    @property
    def write_chunk(self) -> None:
        return None

    def has_sent_last(self, end: bytes) -> bool:
        return self.last.endswith(end)

    def write_comment(self, line: bytes) -> None:
        """Here it is a piece without text."""
        last = self.last
        self._tell([{"content": ""}])
        self.last = last

    def end(self) -> None:
        if self._status != 200:
            self._error = _error_in(self._rest)
        last = self._error or self._last_line()
        if self._is_whole:
            status = 500 if self._status == 200 and self._error else self._status
            body = msgspec.json.encode(last)
            framing = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            super().start(status, [*self._headers, *framing])
            super().write(body)
        elif not self._error:  # which was told
            super().write(_line(last))
        super().end()

    def _tell(self, pieces: list[Json]) -> None:
        if not self._is_whole:
            for piece in pieces:
                super().write(_line(self._error or self._worded(piece) | {"done": False}))
            return
        for name, value in ((name, value) for piece in pieces for name, value in piece.items()):
            self._said.setdefault(name, []).append(value)

    def _read(self, data: bytes) -> Iterator[Json]:
        """The pieces that an event brings."""
        event = msgspec.json.decode(data)
        if "error" in event:
            self._error = _error_in(data)
            yield {}
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            for call in delta.get("tool_calls") or ():
                known = self._calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                for name, text in ({"id": call.get("id")} | call["function"]).items():
                    known[name] += text or ""
            content, thinking = delta.get("content") or "", delta.get("reasoning") or delta.get("reasoning_content")
            if (content or thinking) and not self._only_loads:
                self._first_at = self._first_at or time.perf_counter_ns()
                yield {"content": content, **({"thinking": thinking} if thinking else {})}
            self._finish_reason = choice.get("finish_reason")
            if self._finish_reason and self._calls:
                yield _called(self._calls.values())

    def _worded(self, piece: Json) -> Json:
        created = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        words = {"message": {"role": "assistant", **piece}}
        if not self._is_chat:
            words = {"response" if name == "content" else name: value for name, value in piece.items()}
        return {"model": self._model, "created_at": created, **words}

    def _last_line(self) -> Json:
        now = time.perf_counter_ns()
        first_at = self._first_at or now
        said = {name: parts[0] if name == "tool_calls" else "".join(parts) for name, parts in self._said.items()}
        if self._only_loads:
            return self._worded(said) | {"done": True, "done_reason": "load"}
        return self._worded(said) | {
            "done": True,
            "done_reason": "length" if self._finish_reason == "length" else "stop",
            "total_duration": now - self._begun_at,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", 0),
            "prompt_eval_duration": first_at - self._begun_at,
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": max(now - first_at, 1),
        }


def _called(calls: Any) -> Json:
    """Calls come whole in this API. One whose arguments are no object, as of an answer that was cut, is text."""
    piece: Json = {"content": "", "tool_calls": []}
    for index, call in enumerate(calls):
        try:
            arguments = msgspec.json.decode(call["arguments"] or "{}", type=Json)
        except msgspec.DecodeError:
            piece["content"] += call["arguments"]
        else:
            function = {"index": index, "name": call["name"], "arguments": arguments}
            piece["tool_calls"].append({"id": call["id"], "function": function})
    return {name: value for name, value in piece.items() if value != []}


def _error_in(body: bytes) -> Json:
    """OpenAI's error object, or whatever else was answered, in Ollama's words."""
    try:
        return {"error": msgspec.json.decode(body)["error"]["message"]}
    except (msgspec.DecodeError, LookupError, TypeError):
        return {"error": body.decode(errors="replace")}


def _line(value: Json) -> bytes:
    return msgspec.json.encode(value) + b"\n"
