"""How answers of one request are read follows from what holds them."""

import numpy as np
import pytest
from tests.runtime.server.conftest import byte_level_tokenizer
from tokenizers import AddedToken

from kvasir_runtime.engine.tokenizer import Tokenizer
from kvasir_runtime.server.answer_formats import AnswerFormats, answer_formats
from kvasir_runtime.server.reading import reading_of
from kvasir_runtime.server.structured import ResponseFormat, StructuredFields
from kvasir_runtime.server.tools import CallRule, Tool
from kvasir_runtime.structured.vocabulary import Matcher, Vocabulary, num_words
from kvasir_runtime.talk.events import Arguments, Reasoning
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


CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
OPENS = "<think>\n"
STYLES: dict[str, tuple[tuple[str, ...], str, str | None, str]] = {
    "deepseek_r1": (("<think>", "</think>"), OPENS, None, "</think>"),
    "qwen3": (("<think>", "</think>"), "", "<think>", "</think>"),
    "openai_gptoss": (CHANNELS, "", "<|channel|>analysis<|message|>", "<|end|>"),
    "kimi_k2": (("<think>", "</think>"), "", "<think>", "</think>"),
    "glm45": (("<think>", "</think>"), "", "<think>", "</think>"),
    "minimax_m2": (("<think>", "</think>"), OPENS, None, "</think>"),
    "deepseek_r1 in pieces": ((), OPENS, None, "</think>"),
    "qwen3 in pieces": ((), "", "<think>", "</think>"),
    "granite": ((), "", "Here is my thought process:", "Here is my response:"),
}
"""By the format's name: marks that are one token, the prompt's end, and what opens and closes a thought."""


@pytest.mark.parametrize("are_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("asks", ["free", "schema", "tool", "auto"])
@pytest.mark.parametrize("style", STYLES)
def test_a_budget_ends_thoughts_of_each_style(style: str, asks: str, are_special: bool) -> None:
    """What a model that would think for ever writes, by the masks alone, is read as a thought of just its budget."""
    marks, prompt, opened, closed = STYLES[style]
    name, num_thought = style.removesuffix(" in pieces"), 3
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=are_special or "<|" in mark) for mark in marks])
    known = Tokenizer(tokenizer, {"eos_token": "<|im_end|>"})
    calls = {"openai_gptoss": "openai", "kimi_k2": "kimi_k2", "glm45": "glm45", "minimax_m2": "minimax_m2"}
    formats = answer_formats(known, None, calls.get(name, "hermes"), name)
    rule = CallRule((TOOL,), is_required=asks == "tool") if asks in ("tool", "auto") else None
    reading = reading_of(formats, rule, prompt, thinking_budget=num_thought)
    assert reading is not None
    form = ResponseFormat.model_validate(FORMAT)
    answered = StructuredFields(response_format=form).wanted_grammar() if asks == "schema" else None
    wanted = reading.wanted(answered)
    assert wanted is not None
    vocab = Vocabulary(known, tokenizer.get_vocab_size())
    matcher, thought = vocab.matcher(wanted.make()), tokenizer.encode("hmmmmmm").ids
    written = tokenizer.encode(opened or "").ids + thought[:num_thought]
    matcher.accept(written)
    text = tokenizer.decode(written, skip_special_tokens=False)
    while not text.endswith(closed):
        [forced] = allowed(matcher, tokenizer.get_vocab_size())
        matcher.accept([forced])
        text += tokenizer.decode([forced], skip_special_tokens=False)
    events = reading.parser().feed(text)
    assert [event for event in events if isinstance(event, Reasoning)] == [Reasoning(tokenizer.decode(thought[:3]))]


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    words = np.zeros(num_words(vocab_size), dtype=np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
