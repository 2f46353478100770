"""The output of one response: what an answer is read as, event by event, becomes items, and the events of a stream that
tell of them. At most one item is open.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

from kvasir_chat.open_responses import OfferedTool
from kvasir_runtime.server.custom_input import CustomInput
from kvasir_runtime.server.typed_events import Told
from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class OpenItem(Protocol):
    @property
    def kind(self) -> str: ...

    def begin(self) -> Iterator[Told]: ...

    def add(self, text: str) -> Iterator[Told]: ...

    def end(self, status: Status) -> Iterator[Told]: ...

    def item(self, status: Status) -> Json: ...


class TextItem:
    """A message, or a thought."""

    def __init__(self, kind: Literal["message", "reasoning"], item_id: str, output_index: int) -> None:
        self.kind: str = kind
        self._id = item_id
        self._place = {"item_id": item_id, "output_index": output_index}
        self._output_index = output_index
        self._texts: list[str] = []
        self._part_kind = "output_text" if kind == "message" else "reasoning_text"
        self._besides: Json = {"logprobs": []} if kind == "message" else {}

    def begin(self) -> Iterator[Told]:
        item = self.item("in_progress") | {"content": []}
        yield "response.output_item.added", {"output_index": self._output_index, "item": item}
        yield "response.content_part.added", {**self._place, "content_index": 0, "part": self._part()}

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        fields = {**self._place, "content_index": 0, "delta": text, **self._besides}
        yield f"response.{self._part_kind}.delta", fields

    def end(self, status: Status) -> Iterator[Told]:
        place = {**self._place, "content_index": 0}
        yield f"response.{self._part_kind}.done", {**place, "text": "".join(self._texts), **self._besides}
        yield "response.content_part.done", {**place, "part": self._part()}
        yield "response.output_item.done", {"output_index": self._output_index, "item": self.item(status)}

    def item(self, status: Status) -> Json:
        of_kind: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"id": self._id, "type": self.kind, "status": status, **of_kind, "content": [self._part()]}

    def _part(self) -> Json:
        besides: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self._part_kind, "text": "".join(self._texts), **besides}


class CallItem:
    """A call of a function."""

    kind = "call"

    def __init__(self, tool: OfferedTool, call_id: str, item_id: str, output_index: int) -> None:
        self._output_index = output_index
        self._place = {"item_id": item_id, "output_index": output_index}
        self._texts: list[str] = []
        self._called: Json = {"id": item_id, "call_id": call_id, "name": tool.name}
        if tool.namespace is not None:
            self._called["namespace"] = tool.namespace

    def begin(self) -> Iterator[Told]:
        yield "response.output_item.added", {"output_index": self._output_index, "item": self.item("in_progress")}

    def add(self, text: str) -> Iterator[Told]:
        self._texts.append(text)
        yield "response.function_call_arguments.delta", {**self._place, "delta": text}

    def end(self, status: Status) -> Iterator[Told]:
        told = {"arguments": "".join(self._texts), "name": self._called["name"]}
        yield "response.function_call_arguments.done", {**self._place, **told}
        yield "response.output_item.done", {"output_index": self._output_index, "item": self.item(status)}

    def item(self, status: Status) -> Json:
        return {"type": "function_call", "status": status, **self._called, "arguments": "".join(self._texts)}


class CustomCallItem(CallItem):
    """A call of a custom tool, whose input is a text."""

    def __init__(self, tool: OfferedTool, call_id: str, item_id: str, output_index: int) -> None:
        super().__init__(tool, call_id, item_id, output_index)
        self._input = CustomInput()

    def add(self, text: str) -> Iterator[Told]:
        yield from self._add_input(self._input.feed(text))

    def end(self, status: Status) -> Iterator[Told]:
        yield from self._add_input(self._input.finish())
        yield "response.custom_tool_call_input.done", {**self._place, "input": "".join(self._texts)}
        yield "response.output_item.done", {"output_index": self._output_index, "item": self.item(status)}

    def item(self, status: Status) -> Json:
        return {"type": "custom_tool_call", "status": status, **self._called, "input": "".join(self._texts)}

    def _add_input(self, text: str) -> Iterator[Told]:
        if text:
            self._texts.append(text)
            yield "response.custom_tool_call_input.delta", {**self._place, "delta": text}


class OutputItems:
    def __init__(self, response_id: str, tools: Mapping[str, OfferedTool]) -> None:
        """`tools`: by the names that the model knows."""
        self._response_id = response_id
        self._tools = tools
        self._done: list[Json] = []
        self._open: OpenItem | None = None
        self._num_chars = 0
        self._num_thought_chars = 0

    @property
    def items(self) -> list[Json]:
        """Once all are closed."""
        return self._done

    @property
    def thought_share(self) -> float:
        """Of all that was written."""
        return self._num_thought_chars / max(self._num_chars, 1)

    def add(self, event: Event) -> Iterator[Told]:
        match event:
            case Content(text=text) if text:
                yield from self._add_text("message", "msg", text)
            case Reasoning(text=text) if text:
                self._num_thought_chars += len(text)
                yield from self._add_text("reasoning", "rs", text)
            case CallBegun(name=name, call_id=call_id):
                yield from self.close("completed")
                tool = self._tools.get(name) or OfferedTool("function", name, None, {}, "tools")
                kind, prefix = (CustomCallItem, "ctc") if tool.kind == "custom" else (CallItem, "fc")
                yield from self._begin(kind(tool, call_id or "", self._item_id(prefix), len(self._done)))
            case Arguments(text=text) if text and self._open is not None:
                self._num_chars += len(text)
                yield from self._open.add(text)
            case CallEnded():
                yield from self.close("completed")

    def close(self, status: Status) -> Iterator[Told]:
        if self._open is not None:
            yield from self._open.end(status)
            self._done.append(self._open.item(status))
            self._open = None

    def _add_text(self, kind: Literal["message", "reasoning"], prefix: str, text: str) -> Iterator[Told]:
        if self._open is None or self._open.kind != kind:
            yield from self.close("completed")
            yield from self._begin(TextItem(kind, self._item_id(prefix), len(self._done)))
        assert self._open is not None
        self._num_chars += len(text)
        yield from self._open.add(text)

    def _begin(self, item: OpenItem) -> Iterator[Told]:
        self._open = item
        yield from item.begin()

    def _item_id(self, prefix: str) -> str:
        """The same in every engine that goes on with the response."""
        return f"{prefix}_{self._response_id}_{len(self._done)}"
