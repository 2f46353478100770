"""Answers as they come, in pieces of any size: what is read of them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from kvasir_runtime.talk.formats import FORMATS, REASONING
from kvasir_runtime.talk.parser import AnswerParser

TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {"type": "object"}}
HERMES = (
    "He asks.\n</think>\n\nLet me see.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "{Å</tool_call>\\"}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now"}\n</tool_call>\nDone.'
)
HERMES_EVENTS = [
    Reasoning("He asks."),
    Content("Let me see."),
    CallBegun(0, "weather", None),
    Arguments(0, '{"city": "{Å</tool_call>\\"}"}'),
    CallEnded(0),
    CallBegun(1, "now", None),
    Arguments(1, "{}"),
    CallEnded(1),
    Content("\nDone."),
]


@given(st.lists(st.integers(0, len(HERMES))))
def test_pieces_come_to_the_whole(cuts: list[int]) -> None:
    ends = sorted({*cuts, len(HERMES)})
    pieces = [HERMES[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    parser = AnswerParser(FORMATS["hermes"], REASONING["qwen3"], tools=TOOLS, is_thinking=True)
    events = [event for piece in pieces for event in parser.feed(piece)]
    assert joined([*events, *parser.finish()]) == HERMES_EVENTS


def joined(events: list[Event]) -> list[Event]:
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Content | Reasoning | Arguments) and type(last) is type(event):
            whole[-1] = replace(event, text=last.text + event.text)
        else:
            whole.append(event)
    return whole
