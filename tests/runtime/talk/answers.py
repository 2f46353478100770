"""What models write in each format, and what is to be read of it. The texts are ours, in the manner of the models'
public chat templates."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvasir_runtime.talk.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from kvasir_runtime.talk.formats import FORMATS, REASONING
from kvasir_runtime.talk.parser import AnswerParser

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": STRING,
            "days": INTEGER,
            "exact": {"type": "boolean"},
            "wind": {"type": ["number", "null"]},
            "hours": {"type": "array", "items": INTEGER},
            "place": {"type": "object"},
            "note": {"anyOf": [STRING, {"type": "null"}]},
        },
    },
    "weather_now": {"type": "object", "properties": {}},
}
BAR = "\uff5c"
DSML = f"{BAR}DSML{BAR}"
ODD = 'a "b" \\ {c} [d], Å 🌲\nnew'
"""Of a city's name."""
ODD_JSON = json.dumps(ODD, ensure_ascii=False)
ARGUMENTS = f'{{"city": {ODD_JSON}, "days": 3}}'


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    call_id: str | None = None


@dataclass(frozen=True)
class Answer:
    name: str
    calls: str | None
    text: str
    expected: Sequence[Content | Reasoning | Call]
    reasoning: str | None = None
    is_thinking: bool = False

    def events(self) -> list[Event]:
        events: list[Event] = []
        index = 0
        for each in self.expected:
            if isinstance(each, Call):
                events += [
                    CallBegun(index, each.name, each.call_id), Arguments(index, each.arguments), CallEnded(index)
                ]  # fmt: skip
                index += 1
            else:
                events.append(each)
        return events


def parser_of(answer: Answer) -> AnswerParser:
    calls = FORMATS[answer.calls] if answer.calls else None
    reasoning = REASONING[answer.reasoning] if answer.reasoning else None
    return AnswerParser(calls, reasoning, tools=TOOLS, is_thinking=answer.is_thinking)


def read(answer: Answer, pieces: Iterable[str], *, is_cut: bool = False) -> list[Event]:
    parser = parser_of(answer)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish(is_cut=is_cut)])


def joined(events: Iterable[Event]) -> list[Event]:
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Content | Reasoning | Arguments) and type(last) is type(event):
            whole[-1] = replace(event, text=last.text + event.text)  # type: ignore[union-attr]
        else:
            whole.append(event)
    return whole


NOW = Call("weather_now", "{}")
ANSWERS = [
    Answer(
        "hermes",
        "hermes",
        "He asks.\n</think>\n\nLet me see.\n<tool_call>\n"
        f'{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather_now"}\n</tool_call>\nDone.',
        [
            Reasoning("He asks."),
            Content("Let me see."),
            Call("weather", ARGUMENTS),
            NOW,
            Content("\nDone."),
        ],
        "qwen3",
        is_thinking=True,
    ),
    Answer(
        "hermes: arguments first, as text, none, an id, marks in strings",
        "hermes",
        '<tool_call>{"arguments": {"city": "</tool_call>"}, "name": "weather"}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>'
        '<tool_call>{"id": "call_1", "name": "weather_now", "arguments": null}</tool_call> and '
        '<tool_call>{"type": "function", "function": {"name": "weather", "arguments": {}}}</tool_call>',
        [
            Call("weather", '{"city": "</tool_call>"}'),
            Call("weather", '{"days": 1}'),
            Call("weather_now", "{}", "call_1"),
            Content(" and"),
            Call("weather", "{}"),
        ],
    ),
    Answer(
        "qwen3_coder",
        "qwen3_coder",
        "<think>\nHm.\n</think>\n\nWell\n\n<tool_call>\n<function=weather>\n"
        f"<parameter=city>\n{ODD}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=wind>\nNone\n</parameter>\n"
        '<parameter=hours>\n[1, 2]\n</parameter>\n<parameter=place>\n{"a": {"b": []}}\n</parameter>\n'
        "<parameter=note>\nnull and void\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather_now>\n</function>\n</tool_call>",
        [
            Reasoning("Hm."),
            Content("Well"),
            Call(
                "weather",
                f'{{"city": {ODD_JSON}, "days": 3, "exact": true, "wind": null, "hours": [1, 2], '
                '"place": {"a": {"b": []}}, "note": "null and void"}',
            ),
            NOW,
        ],
        "qwen3",
    ),
    Answer(
        "qwen3_coder: marks left out, and marks in a value",
        "qwen3_coder",
        "<function=weather>\n<parameter=city>\n</parameter>; </function>; <parameter=x> </tool_call>;\n"
        "<parameter=days>\n5\n</parameter>\n<parameter=note>\nlast\n</function>\n</tool_call>\nBye",
        [
            Call(
                "weather",
                '{"city": "</parameter>; </function>; <parameter=x> </tool_call>;", "days": 5, "note": "last"}',
            ),
            Content("\nBye"),
        ],
    ),
    Answer(
        "qwen3_coder: a call within a thought",
        "qwen3_xml",
        "I need <function=none> so\n<tool_call>\n<function=weather_now>\n</function>\n</tool_call>",
        [Reasoning("I need <function=none> so"), NOW],
        "qwen3",
        is_thinking=True,
    ),
    Answer(
        "seed_oss",
        "seed_oss",
        "<seed:think>Hm</seed:think><seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n"
        "</function>\n</seed:tool_call>",
        [Reasoning("Hm"), Call("weather", '{"city": "Oslo"}')],
        "seed_oss",
    ),
    Answer(
        "llama3_json",
        "llama3_json",
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"type": "function", "name": "weather_now", '
        '"parameters": {}}',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "llama3_json with its tag",
        "llama3_json",
        'Sure.<|python_tag|>{"name": "weather_now", "parameters": {}}',
        [Content("Sure."), NOW],
    ),
    Answer(
        "pythonic",
        "pythonic",
        "[weather(city='a\\'b\\x41\\n\\u00e5\"', days=-3, exact=True, wind=None, hours=[1, 2,], "
        "place={'k': (1, 'x')}), "
        'weather_now(), weather(city="\\U0001F332\\q")]',
        [
            Call(
                "weather",
                '{"city": "a\'bA\\n\\u00e5\\"", "days": -3, "exact": true, "wind": null, "hours": [1, 2], '
                '"place": {"k": [1, "x"]}}',
            ),
            NOW,
            Call("weather", '{"city": "🌲\\\\q"}'),
        ],
    ),
    Answer(
        "pythonic: marks, and JSON instead",
        "llama4_pythonic",
        '<|python_start|>[weather(days=0x10)]<|python_end|>{"name": "weather_now", "parameters": {}}',
        [Call("weather", '{"days": 16}'), NOW],
    ),
    Answer(
        "olmo3",
        "olmo3",
        "<function_calls>weather(city='Oslo')\nweather_now()</function_calls>",
        [Call("weather", '{"city": "Oslo"}'), NOW],
    ),
    Answer(
        "lfm2",
        "lfm2",
        "Sure.<|tool_call_start|>[weather(city='Oslo', days=3), weather_now()]<|tool_call_end|>Done.",
        [Content("Sure."), Call("weather", '{"city": "Oslo", "days": 3}'), NOW, Content("Done.")],
    ),
    Answer(
        "hunyuan_a13b: a list",
        "hunyuan_a13b",
        f'<tool_calls>[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "weather_now", "arguments": {{}}}}]'
        "</tool_calls> Done",
        [Call("weather", ARGUMENTS), NOW, Content(" Done")],
    ),
    Answer(
        "hunyuan_a13b: lines, as of MiniMax-M1",
        "jamba",
        f'Well\n<tool_calls>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n'
        '{"name": "weather_now", "arguments": {}}\n</tool_calls>',
        [Content("Well"), Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "nemotron_json",
        "nemotron_json",
        f'<TOOLCALL>[{{"name": "weather", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
        [Call("weather", ARGUMENTS)],
    ),
    Answer(
        "internlm",
        "internlm",
        f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {ARGUMENTS}}}<|action_end|>'
        '<|action_start|><|plugin|>{"name": "weather_now", "parameters": {}}<|action_end|>',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "longcat",
        "longcat",
        f'<longcat_tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</longcat_tool_call>',
        [Call("weather", ARGUMENTS)],
    ),
    Answer(
        "gigachat3",
        "gigachat3",
        f'Well<|function_call|>{{"name": "weather", "arguments": {ARGUMENTS}}}',
        [Content("Well"), Call("weather", ARGUMENTS)],
    ),
    Answer(
        "gigachat3, as before 3.1",
        "gigachat3",
        'function call<|role_sep|>\n{"name": "weather_now", "arguments": {}}',
        [NOW],
    ),
    Answer(
        "minicpm5",
        "minicpm5",
        f'<function name="weather"><param name="city">{ODD}</param><param name="days">3</param></function>\n'
        '<function name="weather_now"></function>',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "mistral before v11",
        "mistral",
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}, "id": "abcDEF123"}}, '
        '{"name": "weather_now", "arguments": {}}]',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "mistral v11",
        "mistral",
        f"[THINK]Hm[/THINK]So[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ARGUMENTS}[TOOL_CALLS]weather_now[ARGS]{{}}",
        [Reasoning("Hm"), Content("So"), Call("weather", ARGUMENTS, "abcDEF123"), NOW],
        "mistral",
    ),
    Answer(
        "mistral without marks before arguments, a thought after text",
        "mistral",
        "One moment.[THINK]Hm[/THINK][TOOL_CALLS]weather_now{}",
        [Content("One moment."), Reasoning("Hm"), NOW],
        "mistral",
    ),
    Answer(
        "deepseek_v3",
        "deepseek_v3",
        f"Hm</think>Well<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>weather\n"
        f"```json\n{ARGUMENTS}\n```<{BAR}tool▁call▁end{BAR}>\n<{BAR}tool▁call▁begin{BAR}>function<{BAR}tool▁sep{BAR}>"
        f"weather_now\n```json\n{{}}\n```<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>",
        [Reasoning("Hm"), Content("Well"), Call("weather", ARGUMENTS), NOW],
        "deepseek_r1",
        is_thinking=True,
    ),
    Answer(
        "deepseek_v31",
        "deepseek_v31",
        f"Well<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>weather<{BAR}tool▁sep{BAR}>{ARGUMENTS}"
        f"<{BAR}tool▁call▁end{BAR}>between<{BAR}tool▁call▁begin{BAR}>weather_now<{BAR}tool▁sep{BAR}>{{}}"
        f"<{BAR}tool▁call▁end{BAR}><{BAR}tool▁calls▁end{BAR}>after",
        [Content("Well"), Call("weather", ARGUMENTS), Content("between"), NOW, Content("after")],
    ),
    Answer(
        "deepseek_v32",
        "deepseek_v32",
        f'Hm</think>Well\n\n<{DSML}function_calls>\n<{DSML}invoke name="weather">\n'
        f'<{DSML}parameter name="city" string="true">ls 2>&1</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f'<{DSML}parameter name="hours">[1]</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="weather_now">\n</{DSML}invoke>\n</{DSML}function_calls>',
        [Reasoning("Hm"), Content("Well"), Call("weather", '{"city": "ls 2>&1", "days": 3, "hours": [1]}'), NOW],
        "deepseek_v3",
        is_thinking=True,
    ),
    Answer(
        "deepseek_v4: another section, arguments as JSON",
        "deepseek_v4",
        f'<{DSML}tool_calls>\n<{DSML}invoke name="weather">{ARGUMENTS}</{DSML}invoke>\n<{DSML}invoke name="weather">'
        f'<{DSML}parameter name="city" string="false">"a"</{DSML}parameter></{DSML}invoke></{DSML}tool_calls>',
        [Call("weather", ARGUMENTS), Call("weather", '{"city": "a"}')],
    ),
    Answer(
        "kimi_k2",
        "kimi_k2",
        "<think>Hm</think>Well <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|> functions.weather_now:1\n"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [
            Reasoning("Hm"),
            Content("Well"),
            Call("weather", ARGUMENTS, "functions.weather:0"),
            Call("weather_now", "{}", "functions.weather_now:1"),
        ],
        "kimi_k2",
    ),
    Answer(
        "kimi_k2: a call within a thought, an id of another kind, no arguments",
        "kimi_k2",
        "Hm<|tool_calls_section_begin|><|tool_call_begin|>weather_now<|tool_call_argument_begin|><|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [Reasoning("Hm"), NOW],
        "kimi_k2",
        is_thinking=True,
    ),
    Answer(
        "glm45",
        "glm45",
        "\n<think>Hm</think>\nWell\n<tool_call>weather\n<arg_key>city</arg_key>\n"
        f"<arg_value>{ODD}</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>weather_now\n</tool_call>",
        [Reasoning("Hm"), Content("Well"), Call("weather", ARGUMENTS), NOW],
        "glm45",
    ),
    Answer(
        "glm47",
        "glm47",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>{ODD}</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>weather_now</tool_call>",
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "gemma4",
        "gemma4",
        '<|channel>thought\nHm\n<channel|>Well<|tool_call>call:weather{city:<|"|>'
        f'{ODD}<|"|>,days:3,hours:[1,2],place:{{a:<|"|>b<|"|>,c:true}},note:bare text}}<tool_call|>'
        "<|tool_call>call:weather_now{}<tool_call|>",
        [
            Reasoning("Hm"),
            Content("Well"),
            Call(
                "weather",
                f'{{"city":{ODD_JSON},"days":3,"hours":[1,2],"place":{{"a":"b","c":true}},"note":"bare text"}}',
            ),
            NOW,
        ],
        "gemma4",
    ),
    Answer(
        "functiongemma",
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:3}<end_function_call>",
        [Call("weather", '{"city":"Oslo","days":3}')],
    ),
    Answer(
        "granite",
        "granite",
        f'Here is my thought process:\nHm\nHere is my response:\nWell <tool_call>[{{"name": "weather", "arguments": '
        f'{ARGUMENTS}}}, {{"name": "weather_now", "arguments": {{}}}}]',
        [Reasoning("Hm"), Content("Well"), Call("weather", ARGUMENTS), NOW],
        "granite",
    ),
    Answer(
        "phi4_mini_json",
        "phi4_mini_json",
        f'functools[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "weather_now", "arguments": {{}}}}]',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "minimax_m2",
        "minimax_m2",
        'Hm\n</think>\n\nWell\n<minimax:tool_call>\n<invoke name="weather">\n'
        f"<parameter name=\"city\">{ODD}</parameter>\n<parameter name='days'>3</parameter>\n</invoke>\n"
        "<invoke name=weather_now>\n</invoke>\n</minimax:tool_call>",
        [Reasoning("Hm"), Content("Well"), Call("weather", ARGUMENTS), NOW],
        "minimax_m2",
        is_thinking=True,
    ),
    Answer(
        "json",
        "json",
        f' [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "weather_now", "parameters": {{}}}}]',
        [Call("weather", ARGUMENTS), NOW],
    ),
    Answer(
        "openai",
        "openai",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>Well<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|>",
        [Reasoning("Hm"), Content("Well"), Call("weather", ARGUMENTS)],
        "openai_gptoss",
    ),
    Answer(
        "openai: other headers",
        "openai",
        " to=functions.weather_now<|channel|>analysis code<|message|>{}<|call|><|start|>assistant<|channel|>analysis"
        "<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>assistant to=python"
        "<|channel|>final<|message|>1 + 1<|call|>",
        [
            NOW,
            Reasoning("A\nB"),
            Content("to=python 1 + 1"),
        ],
        "openai_gptoss",
    ),
]
