"""What clients say of the form of an answer, and the grammar that it comes to.

`response_format` is OpenAI's; `structured_outputs`, the older `guided_*` and `structural_tag` are vLLM's; `regex`,
`ebnf` and `json_schema` are SGLang's. Grammars are made on threads and tried in processes of their own, so neither
other requests nor steps wait for them, and the last ones are kept.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvasir_runtime.errors import GrammarError, InvalidRequestError
from kvasir_runtime.server.body import Body, RequestModel, Unsupported
from kvasir_runtime.server.structural_tags import structural_tag_format, structural_tag_grammar
from kvasir_runtime.structured.checking import GrammarChecker, TooCostlyError
from kvasir_runtime.structured.grammars import choice_grammar, ebnf_grammar, json_object_grammar, regex_grammar
from kvasir_runtime.structured.json_schema import json_schema_grammar, refused_part

NUM_COMPILERS = 2
MAX_KEPT = 256
"""Grammars, and refusals: what was too large once is not tried again."""
MAX_GRAMMAR_CHARS = 1_000_000

Text = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
JsonSchema = dict[str, Any] | bool | Text
"""Itself, or its text."""


class JsonSchemaFormat(RequestModel):
    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None
    """Answers follow the schema in either case."""


class ResponseFormat(RequestModel):
    model_config = ConfigDict(populate_by_name=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    flat_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    """Where it stands in the Responses API, and in llama.cpp, beside type json_object too."""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None
    """Of a structural tag, in the older shape and the newer."""

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.asked_schema is None:
            raise PydanticCustomError(
                "response_format", "response_format: type json_schema needs json_schema: {{name, schema}}"
            )
        return self

    @property
    def asked_schema(self) -> dict[str, Any] | bool | None:
        nested = None if self.json_schema is None else self.json_schema.json_schema
        return self.flat_schema if nested is None else nested


class StructuredOutputs(RequestModel):
    model_config = ConfigDict(populate_by_name=True)

    json_schema: JsonSchema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    grammar: Text | None = None
    structural_tag: Any = None
    """Itself, or its text."""
    disable_any_whitespace: bool = False
    disable_fallback: Any = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None


RESPONSE_FORMAT = "response_format"


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    field: str
    """That asks for it."""
    key: str
    """Equal where the grammar is."""
    make: Callable[[], str]
    schema: Any = None
    """That it is made of; None: of something else."""

    @property
    def is_of_the_answer(self) -> bool:
        """Of what is said where no tool is called. The others are of all that is written behind a thought."""
        return self.field.startswith(RESPONSE_FORMAT)


class StructuredFields(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[str], Field(min_length=1)] | None = None
    guided_grammar: Text | None = None
    json_schema: JsonSchema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    structural_tag: Any = None

    def wanted_grammar(self, special_ids: Mapping[str, int] = MappingProxyType({})) -> WantedGrammar | None:
        """`special_ids`: of the model's special tokens, by their text. Raises InvalidRequestError where several are
        asked for."""
        wanted = [
            *self._of_response_format(special_ids),
            *self._of_structured_outputs(special_ids),
            *self._of_guided(),
            *self._of_plain_names(special_ids),
        ]
        if len(wanted) > 1:
            fields = ", ".join(each.field for each in wanted)
            raise InvalidRequestError(f"{fields}: each says how the answer is to look; send one", wanted[1].field)
        return wanted[0] if wanted else None

    def _of_response_format(self, special_ids: Mapping[str, int]) -> list[WantedGrammar]:
        wanted, field = self.response_format, RESPONSE_FORMAT
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "structural_tag":
            sent = wanted.model_dump(include={"structures", "triggers", "format"}, exclude_none=True)
            return [_wanted_structural_tag(field, sent, special_ids)]
        if wanted.asked_schema is None:
            return [_wanted(field, "object", None, json_object_grammar)]
        asked = wanted.asked_schema
        if wanted.type == "json_object":
            asked = {"allOf": [{"type": "object"}, asked]}
        return [_wanted_schema(f"{field}.json_schema" if wanted.json_schema else f"{field}.schema", asked)]

    def _of_structured_outputs(self, special_ids: Mapping[str, int]) -> list[WantedGrammar]:
        asked, field = self.structured_outputs, "structured_outputs"
        if asked is None:
            return []
        spaced = not asked.disable_any_whitespace
        wanted = []
        if asked.json_object:
            make = partial(json_object_grammar, any_whitespace=spaced)
            wanted.append(_wanted(f"{field}.json_object", "object", spaced, make))
        if asked.json_schema is not None:
            wanted.append(_wanted_schema(f"{field}.json", asked.json_schema, any_whitespace=spaced))
        if asked.structural_tag is not None:
            wanted.append(_wanted_structural_tag(f"{field}.structural_tag", asked.structural_tag, special_ids))
        return wanted + _plain(f"{field}.", asked.regex, asked.choice, asked.grammar)

    def _of_guided(self) -> list[WantedGrammar]:
        wanted = [] if self.guided_json is None else [_wanted_schema("guided_json", self.guided_json)]
        return wanted + _plain("guided_", self.guided_regex, self.guided_choice, self.guided_grammar)

    def _of_plain_names(self, special_ids: Mapping[str, int]) -> list[WantedGrammar]:
        wanted = [] if self.json_schema is None else [_wanted_schema("json_schema", self.json_schema)]
        if self.ebnf is not None:
            wanted.append(_wanted("ebnf", "grammar", self.ebnf, partial(ebnf_grammar, self.ebnf)))
        if self.structural_tag is not None:
            wanted.append(_wanted_structural_tag("structural_tag", self.structural_tag, special_ids))
        return wanted + _plain("", self.regex, None, None)


GRAMMAR_FIELDS = StructuredFields.model_fields.keys() - Body.model_fields.keys()
"""A body without any of them asks for no grammar."""


def _plain(prefix: str, regex: str | None, choice: list[str] | None, grammar: str | None) -> list[WantedGrammar]:
    asked = {"regex": (regex, regex_grammar), "choice": (choice, choice_grammar), "grammar": (grammar, ebnf_grammar)}
    return [
        _wanted(prefix + name, name, value, partial(make, value))  # type: ignore[arg-type]
        for name, (value, make) in asked.items()
        if value is not None
    ]


def _wanted(field: str, kind: str, value: Any, make: Callable[[], str]) -> WantedGrammar:
    return WantedGrammar(field, kind + json.dumps(value), make)


def _wanted_schema(field: str, schema: Any, *, any_whitespace: bool = True) -> WantedGrammar:
    """The order of keys counts: answers have their properties in it."""
    schema = _read(schema, field, "schema")
    make = partial(json_schema_grammar, schema, any_whitespace=any_whitespace)
    return WantedGrammar(field, f"schema {any_whitespace}" + json.dumps(schema), make, schema)


def _wanted_structural_tag(field: str, sent: Any, special_ids: Mapping[str, int]) -> WantedGrammar:
    sent = _read(sent, field, "structural tag")
    asked = structural_tag_format(sent, field)
    return _wanted(field, "structural tag", sent, partial(structural_tag_grammar, asked, special_ids))


def _read(sent: Any, field: str, name: str) -> Any:
    """What may come as its text."""
    if not isinstance(sent, str):
        return sent
    try:
        return json.loads(sent)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: the {name} is no JSON: {error}", field) from error


class Grammars:
    """Makes and checks them."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_COMPILERS, "grammar")
        self._checkers: SimpleQueue[GrammarChecker] = SimpleQueue()
        self._known: OrderedDict[str, str | GrammarError] = OrderedDict()

    async def grammar_of(self, wanted: WantedGrammar, vocab_size: int) -> str:
        """Raises InvalidRequestError."""
        if len(wanted.key) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{wanted.field}: at most {MAX_GRAMMAR_CHARS:,} characters are possible, but {len(wanted.key):,} came",
                wanted.field,
            )
        found = self._known.pop(wanted.key, None)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._make, wanted, vocab_size)
        self._known[wanted.key] = found
        while len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)
        if isinstance(found, GrammarError):
            raise InvalidRequestError(f"{wanted.field}: {found}", wanted.field) from found
        return found

    def close(self) -> None:
        """Behind the last request."""
        self._threads.shutdown(cancel_futures=True)
        while not self._checkers.empty():
            self._checkers.get().close()

    def _make(self, wanted: WantedGrammar, vocab_size: int) -> str | GrammarError:
        try:
            grammar = wanted.make()
        except GrammarError as error:
            return error
        except ValueError as error:  # of llguidance: what is no JSON (NaN) or no Unicode
            return GrammarError(str(error))
        try:
            self._check(grammar, vocab_size)
        except TooCostlyError as error:
            return error
        except GrammarError as error:
            return error if wanted.schema is None else self._placed(error, wanted.schema, vocab_size)
        return grammar

    def _placed(self, error: GrammarError, schema: Any, vocab_size: int) -> GrammarError:
        """What llguidance says of a schema, with the place of what is at fault."""

        def refuses(grammar: str) -> bool:
            try:
                self._check(grammar, vocab_size)
            except TooCostlyError:
                return False
            except GrammarError:
                return True
            return False

        return GrammarError(f"what stands at {refused_part(schema, refuses) or 'the top'} of the schema: {error}")

    def _check(self, grammar: str, vocab_size: int) -> None:
        """One thread has one checker at a time, so there are as many as threads."""
        try:
            checker = self._checkers.get_nowait()
        except Empty:
            checker = GrammarChecker(vocab_size)
        try:
            checker.check(grammar)
        finally:
            self._checkers.put(checker)
