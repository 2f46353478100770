"""What clients say of tools: which there are, and whether the answer is to call one.

A tool is kept as it was sent, since chat templates print it whole; what is read of it is checked here.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvasir_runtime.server.body import Body, RequestModel
from kvasir_runtime.talk.grammar import CallableTool

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | bool | None = None
    """The JSON Schema of its arguments; None: any object."""
    strict: bool | None = None
    """Whether arguments are held to it where the model may choose."""


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"] = "function"
    function: Function
    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)
    _input_grammar: str | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, sent: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        tool = read(sent)
        tool._sent = sent
        return tool

    @property
    def callable(self) -> CallableTool:
        function = self.function
        return CallableTool(function.name, function.parameters, bool(function.strict), self._input_grammar)

    @property
    def is_held(self) -> bool:
        """Whether its calls follow a grammar where the model may choose."""
        return bool(self.function.strict) or self._input_grammar is not None

    def hold_input(self, grammar: str) -> None:
        """As `CallableTool.input_grammar`."""
        self._input_grammar = grammar

    @property
    def sent(self) -> dict[str, Any]:
        """With all keys in the client's order."""
        return self._sent


class FunctionName(RequestModel):
    name: Name


class NamedFunction(RequestModel):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(RequestModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


@dataclass(frozen=True, slots=True)
class CallRule:
    """Which tools an answer may call."""

    tools: tuple[Tool, ...]
    is_required: bool = False
    """At least one of them is called, and nothing else is said."""
    is_named: bool = False
    """The client asks for this one call, and its answer ends as one without calls does, as OpenAI's do."""
    is_parallel: bool = True
    """Whether several may be called."""

    @property
    def is_held(self) -> bool:
        """Calls follow a grammar, whether there is one or not."""
        return self.is_required or any(tool.is_held for tool in self.tools)


_NAMED = "an object of the type 'function' has a function with a name: {'function': {'name': '...'}}"
_ALLOWED = "allowed_tools has a mode, 'auto' or 'required', and tools, at least one of those that were given"


def _check_kind(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") not in ("function", "allowed_tools"):
        raise PydanticCustomError("tool_choice", "an object here has the type 'function' or 'allowed_tools'")
    if isinstance(value, dict) and value["type"] == "function" and not isinstance(value.get("function"), dict):
        raise PydanticCustomError("tool_choice", _NAMED)
    if isinstance(value, dict) and value["type"] == "allowed_tools":
        match value.get("allowed_tools"):
            case {"mode": "auto" | "required", "tools": [_, *_]}:
                pass
            case _:
                raise PydanticCustomError("tool_choice", _ALLOWED)
    return value


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedToolsChoice, BeforeValidator(_check_kind)
]


class OfferedTools(Body):
    """What a prompt tells of."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class ToolFields(OfferedTools):
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def call_rule(self) -> CallRule | None:
        """None: the answer is text, whatever it looks like."""
        if not self.tools or self.tool_choice == "none":
            return None
        tools, is_parallel = tuple(self.tools), self.parallel_tool_calls is not False
        match self.tool_choice:
            case NamedFunction(function=function):
                named = tuple(tool for tool in tools if tool.function.name == function.name)
                return CallRule(named[:1], is_required=True, is_named=True, is_parallel=False)
            case AllowedToolsChoice(allowed_tools=allowed):
                names = {each.function.name for each in allowed.tools}
                some = tuple(tool for tool in tools if tool.function.name in names)
                return CallRule(some, is_required=allowed.mode == "required", is_parallel=is_parallel)
        return CallRule(tools, is_required=self.tool_choice == "required", is_parallel=is_parallel)

    def check_choice(self) -> None:
        """Raises PydanticCustomError for one that the tools do not allow."""
        if self.tool_choice in (None, "none", "auto"):
            return
        if not self.tools:
            raise PydanticCustomError("tool_choice", "tool_choice asks for a call, but no tools were given")
        known = {tool.function.name for tool in self.tools}
        for name in _named(self.tool_choice):
            if name not in known:
                raise PydanticCustomError(
                    "tool_choice", "tool_choice names {name}, which is none of the tools", {"name": repr(name)}
                )


def _named(choice: ToolChoice | None) -> list[str]:
    match choice:
        case NamedFunction(function=function):
            return [function.name]
        case AllowedToolsChoice(allowed_tools=allowed):
            return [each.function.name for each in allowed.tools]
    return []
