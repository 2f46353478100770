"""How an answer is read between the detokenizer and a shape: thoughts and calls of tools are told from text.

The formats are the served model's. What one request asks of them is a `Reading`, and each of its sequences has a
parser. A request that asks for neither has no reading, and its text goes to the shape as it is.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvasir_runtime.engine.generation import SequenceDelta
from kvasir_runtime.errors import InvalidRequestError
from kvasir_runtime.requests.outputs import FinishReason
from kvasir_runtime.server.answer_formats import AnswerFormats
from kvasir_runtime.server.structured import WantedGrammar
from kvasir_runtime.server.tools import CallRule
from kvasir_runtime.structured.grammars import either
from kvasir_runtime.structured.thoughts import Thought, behind_a_thought, behind_marks
from kvasir_runtime.talk.events import Arguments, CallBegun, Content, Event, Reasoning
from kvasir_runtime.talk.format import Channels, ReasoningFormat
from kvasir_runtime.talk.grammar import calls_grammar
from kvasir_runtime.talk.parser import AnswerParser, is_thought_open

TOOLS_FIELD = "tools"
BUDGET_FIELD = "thinking_token_budget"
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one request's answers."""

    formats: AnswerFormats
    rule: CallRule | None
    is_thinking: bool
    """The prompt has begun a thought."""
    includes_reasoning: bool
    thinking_budget: int | None
    """Tokens of a thought; None: any number."""

    @property
    def shown_special_ids(self) -> frozenset[int]:
        """Parsers find marks by their text."""
        formats = self.formats
        return formats.special_reasoning_ids | (formats.special_call_ids if self.rule is not None else frozenset())

    def parser(self) -> AnswerParser:
        rule = self.rule
        schemas = {tool.function.name: tool.function.parameters for tool in (rule.tools if rule is not None else ())}
        calls = None if rule is None else self.formats.calls
        is_held = rule is not None and rule.is_held
        return AnswerParser(calls, self.formats.reasoning, tools=schemas, is_thinking=self.is_thinking, is_held=is_held)

    def wanted(self, answer: WantedGrammar | None) -> WantedGrammar | None:
        """The grammar of all that the model writes, where its answer is to follow one. Raises InvalidRequestError."""
        wanted, thought = self._with_calls(answer), self._thought()
        if thought is None or (wanted is None and thought.max_tokens is None):
            return wanted
        key = f"thought {thought.is_open} {thought.max_tokens}"
        if wanted is None:
            special_ids = self.formats.special_ids.values()
            return WantedGrammar(BUDGET_FIELD, key, lambda: behind_a_thought(None, thought, special_ids))
        return WantedGrammar(
            wanted.field, f"{key} {wanted.key}", lambda: behind_a_thought(wanted.make(), thought), wanted.schema
        )

    def _with_calls(self, answer: WantedGrammar | None) -> WantedGrammar | None:
        """What comes behind a thought: calls, or an answer that follows `answer`."""
        rule, answer = self.rule, self._behind_header(answer)
        if rule is None or (answer is None and not rule.is_held):
            return answer
        if answer is not None and not answer.is_of_the_answer:
            if not rule.is_required:
                return answer  # which may be a call, too
            raise InvalidRequestError(
                f"{answer.field}: it says how all of the answer is to look, but tool_choice asks for a call; send one "
                "of them",
                answer.field,
            )
        calls = self._calls(rule, is_required=rule.is_required or answer is not None)
        if answer is None or rule.is_required:
            return calls
        return WantedGrammar(answer.field, f"{calls.key} or {answer.key}", lambda: either(calls.make(), answer.make()))

    def _behind_header(self, answer: WantedGrammar | None) -> WantedGrammar | None:
        """With the header that an answer has among a model's messages."""
        channels = self.formats.reasoning
        if answer is None or not isinstance(channels, Channels):
            return answer
        header, token_ids = f"{channels.channel}final{channels.message}", self.formats.reasoning_token_ids
        return replace(answer, make=lambda: behind_marks(header, answer.make(), token_ids))

    def _calls(self, rule: CallRule, *, is_required: bool) -> WantedGrammar:
        formats, tools = self.formats, [tool.callable for tool in rule.tools]
        assert formats.calls is not None
        make = partial(
            calls_grammar,
            formats.calls,
            tools,
            is_required=is_required,
            is_parallel=rule.is_parallel,
            special_ids=formats.special_ids,
        )
        described = [[tool.name, tool.is_strict, tool.parameters, tool.input_grammar] for tool in tools]
        return WantedGrammar(TOOLS_FIELD, f"calls {is_required} {rule.is_parallel} {json.dumps(described)}", make)

    def _thought(self) -> Thought | None:
        match self.formats.reasoning:
            case None:
                return None
            case Channels() as channels:
                opened = f"{channels.channel}{channels.reasoning}{channels.message}"
                closed, behind = channels.ended[0], f"{channels.started}assistant"
                is_optional = self.thinking_budget is None
            case ReasoningFormat() as reasoning:
                opened, closed = self._one_token(reasoning.opened), self._one_token(reasoning.closed)
                behind, is_optional = "", True
        return Thought(
            opened=opened,
            closed=closed,
            is_open=self.is_thinking,
            behind=behind,
            is_optional=is_optional,
            token_ids=self.formats.reasoning_token_ids,
            max_tokens=self.thinking_budget,
        )

    def _one_token(self, marks: Sequence[str]) -> str:
        """That which the model knows, of several spellings."""
        return next((mark for mark in marks if mark in self.formats.reasoning_token_ids), marks[0])


def reading_of(
    formats: AnswerFormats,
    rule: CallRule | None,
    prompt: str,
    *,
    includes_reasoning: bool = True,
    thinking_budget: int | None = None,
) -> Reading | None:
    """`prompt`: its end. None: text is all that there is to read. Raises InvalidRequestError where calls are asked for
    and it is not known how the model writes them.
    """
    if rule is not None and formats.calls is None:
        raise InvalidRequestError(
            "tools: it is not known how this model writes calls; start the server with --tool-call-parser, or set "
            "tool_choice: none",
            "tools",
        )
    if rule is None and formats.reasoning is None:
        return None
    is_thinking = formats.reasoning is not None and is_thought_open(formats.reasoning, prompt)
    return Reading(formats, rule, is_thinking, includes_reasoning, thinking_budget)


@dataclass(slots=True)
class Written:
    """Of one sequence."""

    num_tokens: int = 0
    num_chars: int = 0
    num_thought_chars: int = 0

    def add(self, delta: SequenceDelta, events: Sequence[Event]) -> None:
        self.num_tokens += len(delta.token_ids)
        for event in events:
            if isinstance(event, Content | Reasoning | Arguments):
                self.num_chars += len(event.text)
                self.num_thought_chars += len(event.text) if isinstance(event, Reasoning) else 0

    @property
    def num_reasoning_tokens(self) -> int:
        return round(self.num_tokens * self.num_thought_chars / max(self.num_chars, 1))


class AnswerReader:
    """The sequences of one request, each as far as it has come. A stream that goes on in another engine gets the same
    ids there, since they are made of what its journal keeps."""

    def __init__(self, reading: Reading, request_id: str, created: int) -> None:
        self._reading = reading
        self._identity = f"{request_id} {created}"
        self._parsers: dict[int, AnswerParser] = {}
        self._callers: set[int] = set()
        """Sequences with a call."""
        self._written: defaultdict[int, Written] = defaultdict(Written)

    def read(self, delta: SequenceDelta) -> list[Event]:
        """What a delta brings, with calls' ids."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._reading.parser()
        events = parser.feed(delta.text)
        if delta.finish_reason is not None:
            is_models_end = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
            events += parser.finish(is_cut=not is_models_end)
        self._written[delta.index].add(delta, events)
        return [self._with_id(delta.index, event) for event in events if self._is_wanted(event)]

    @property
    def num_reasoning_tokens(self) -> int | None:
        """So far, by their share of the text; None: the model is not known to think."""
        if self._reading.formats.reasoning is None:
            return None
        return sum(written.num_reasoning_tokens for written in self._written.values())

    def finish_reason(self, delta: SequenceDelta) -> FinishReason | str | None:
        """As OpenAI has it, after `read`."""
        is_named = self._reading.rule is not None and self._reading.rule.is_named
        is_call = delta.index in self._callers and delta.finish_reason == "stop" and not is_named
        return "tool_calls" if is_call else delta.finish_reason

    def _is_wanted(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self._reading.includes_reasoning
            case Content():
                return True
        rule = self._reading.rule
        return event.index == 0 or rule is None or rule.is_parallel

    def _with_id(self, index: int, event: Event) -> Event:
        if not isinstance(event, CallBegun):
            return event
        self._callers.add(index)
        return event if event.call_id else replace(event, call_id=self._call_id(index, event.index))

    def _call_id(self, index: int, call_index: int) -> str:
        digest = hashlib.sha256(f"{self._identity} {index} {call_index}".encode())
        if self._reading.formats.calls_name != "mistral":
            return f"call_{digest.hexdigest()[:24]}"
        number = int.from_bytes(digest.digest())
        return "".join(_DIGITS[number // 62**place % 62] for place in range(9))  # its template takes no others
