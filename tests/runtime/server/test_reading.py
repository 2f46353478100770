"""How answers of one request are read follows from what holds them."""

import pytest

from kvasir_runtime.server.answer_formats import AnswerFormats
from kvasir_runtime.server.reading import reading_of
from kvasir_runtime.server.tools import CallRule, Tool
from kvasir_runtime.talk.events import Arguments
from kvasir_runtime.talk.formats import FORMATS

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOL = Tool.model_validate({"type": "function", "function": {"name": "weather", "parameters": WEATHER}})
FORMS = AnswerFormats(calls_name="qwen3_coder", calls=FORMATS["qwen3_coder"])


@pytest.mark.parametrize(
    ("is_required", "city"), [(True, '"</parameter></function><parameter=days>\\n1"'), (False, '""')]
)
def test_a_call_that_a_grammar_held_is_read_to_the_letter(is_required: bool, city: str) -> None:
    text = (
        "<tool_call><function=weather><parameter=city>\n</parameter></function><parameter=days>\n1\n</parameter>"
        "</function></tool_call>"
    )
    reading = reading_of(FORMS, CallRule((TOOL,), is_required=is_required), "")
    assert reading is not None
    parser = reading.parser()
    events = [*parser.feed(text), *parser.finish(is_cut=False)]
    arguments = "".join(event.text for event in events if isinstance(event, Arguments))
    assert arguments.startswith('{"city": ' + city)
