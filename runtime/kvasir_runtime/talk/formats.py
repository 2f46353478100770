"""The formats, by vLLM's names of `--tool-call-parser` and `--reasoning-parser`; `json` is ours."""

from dataclasses import replace
from typing import Final

from kvasir_runtime.talk.format import (
    CallFormat,
    Channels,
    JsonCall,
    NamedCall,
    Parameters,
    ReasoningFormat,
    Values,
)
from kvasir_runtime.talk.literals import JSON, KEYWORDS, OBJECT, PYTHON, Literals

BAR: Final = "\uff5c"
"""DeepSeek's, of full width."""
DSML: Final = f"{BAR}DSML{BAR}"

HERMES: Final = CallFormat(
    (JsonCall(),),
    opened=("<tool_call>",),
    closed=("</tool_call>",),
    shown_by=(("<tool_call>",),),
)
LONGCAT: Final = CallFormat(
    (JsonCall(),),
    opened=("<longcat_tool_call>",),
    closed=("</longcat_tool_call>",),
    shown_by=(("<longcat_tool_call>",),),
)
INTERNLM: Final = CallFormat(
    (JsonCall("parameters"),),
    opened=("<|action_start|><|plugin|>",),
    closed=("<|action_end|>",),
    shown_by=(("<|action_start|>",),),
)
GIGACHAT3: Final = CallFormat(
    (JsonCall(),), opened=("<|function_call|>", "function call<|role_sep|>"), shown_by=(("<|function_call|>",),)
)
TOOL_CALLS: Final = CallFormat(
    (JsonCall(),),
    section_opened=("<tool_calls>",),
    section_closed=("</tool_calls>",),
    is_list=True,
    shown_by=(("<tool_calls>", "</tool_calls>"),),
)
NEMOTRON: Final = replace(
    TOOL_CALLS, section_opened=("<TOOLCALL>",), section_closed=("</TOOLCALL>",), shown_by=(("<TOOLCALL>",),)
)
QWEN3_CODER: Final = CallFormat(
    (
        NamedCall(
            Parameters(("<parameter=",), (">",), ("</parameter>",), has_python_words=True, has_newlines=True),
            before=("<function=",),
            after=(">",),
            closed=("</function>",),
        ),
    ),
    opened=("<tool_call>",),
    closed=("</tool_call>",),
    is_opened_optional=True,
    ends_thought=True,
    shown_by=(("<function=", "<parameter="),),
)
SEED: Final = CallFormat(
    (
        NamedCall(
            Parameters(("<parameter=",), (">",), ("</parameter>",), has_python_words=True),
            before=("<function=",),
            after=(">",),
            closed=("</function>",),
        ),
    ),
    opened=("<seed:tool_call>",),
    closed=("</seed:tool_call>",),
    is_opened_optional=True,
    ends_thought=True,
    shown_by=(("<seed:tool_call>",),),
)
MINICPM5: Final = CallFormat(
    (NamedCall(Parameters(('<param name="',), ('">',), ("</param>",)), after=('">',)),),
    opened=('<function name="',),
    closed=("</function>",),
    shown_by=(('<function name="', '<param name="'),),
)
LLAMA3_JSON: Final = CallFormat(
    (JsonCall("parameters"),),
    section_opened=("<|python_tag|>",),
    between=";",
    bare="{[",
    shown_by=(('"parameters": dictionary of argument name',),),
)
PYTHONIC: Final = CallFormat(
    (NamedCall(Values(PYTHON, KEYWORDS)), JsonCall("parameters")),
    section_opened=("<|python_start|>",),
    section_closed=("<|python_end|>",),
    between=";",
    is_list=True,
    bare="[{",
    shown_by=(("<|python_start|>",), ("[func_name1(",)),
)
LFM2: Final = CallFormat(
    PYTHONIC.bodies,
    section_opened=("<|tool_call_start|>",),
    section_closed=("<|tool_call_end|>",),
    is_list=True,
    shown_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
)
OLMO3: Final = CallFormat(
    PYTHONIC.bodies,
    section_opened=("<function_calls>",),
    section_closed=("</function_calls>",),
    shown_by=(("<function_calls>", "<functions>"),),
)
MISTRAL: Final = CallFormat(
    (
        JsonCall(),
        NamedCall(Values(), after=("[ARGS]",), id_opened=("[CALL_ID]",), needs=("[ARGS]",)),
        NamedCall(Values(), until=("{",)),
    ),
    opened=("[TOOL_CALLS]",),
    is_list=True,
    shown_by=(("[TOOL_CALLS]",),),
)
DEEPSEEK_V3: Final = CallFormat(
    (
        NamedCall(
            Values(), before=(f"function<{BAR}tool▁sep{BAR}>",), after=("\n```json\n", "\n```json"), closed=("```",)
        ),
        NamedCall(Values(), after=(f"<{BAR}tool▁sep{BAR}>",)),
    ),
    opened=(f"<{BAR}tool▁call▁begin{BAR}>",),
    closed=(f"<{BAR}tool▁call▁end{BAR}>",),
    section_opened=(f"<{BAR}tool▁calls▁begin{BAR}>",),
    section_closed=(f"<{BAR}tool▁calls▁end{BAR}>",),
    shown_by=((f"<{BAR}tool▁sep{BAR}>", "```json"),),
)
DEEPSEEK_V31: Final = replace(DEEPSEEK_V3, bodies=DEEPSEEK_V3.bodies[::-1], shown_by=((f"<{BAR}tool▁sep{BAR}>",),))
_INVOKE: Final = (f'<{DSML}invoke name="', f'<{DSML} invoke name="')
_INVOKED: Final = (f"</{DSML}invoke>", f"</{DSML} invoke>")
_DSML_SECTIONS: Final = ("function_calls", "tool_calls", "toolcalls", "tool", "calls", " calls")
_DSML_PARAMETER: Final = (f'<{DSML}parameter name="', f'<{DSML} parameter name="')
DEEPSEEK_DSML: Final = CallFormat(
    (
        NamedCall(
            Parameters(
                _DSML_PARAMETER,
                ('">',),
                (f"</{DSML}parameter>", f"</{DSML} parameter>"),
                string_key_closed=('" string="true">',),
                json_key_closed=('" string="false">',),
            ),
            before=_INVOKE,
            after=('">',),
            until=(*_DSML_PARAMETER, *_INVOKED),
            closed=_INVOKED,
        ),
        NamedCall(Values(), before=_INVOKE, after=('">',), until=("{",), closed=_INVOKED),
    ),
    section_opened=tuple(f"<{DSML}{name}>" for name in _DSML_SECTIONS),
    section_closed=tuple(f"</{DSML}{name}>" for name in _DSML_SECTIONS),
    ends_thought=True,
    shown_by=((DSML,),),
)
KIMI_K2: Final = CallFormat(
    (NamedCall(Values(), before=("functions.", ""), after=("<|tool_call_argument_begin|>",), is_numbered=True),),
    opened=("<|tool_call_begin|>",),
    closed=("<|tool_call_end|>",),
    section_opened=("<|tool_calls_section_begin|>",),
    section_closed=("<|tool_calls_section_end|>",),
    ends_thought=True,
    shown_by=(("<|tool_calls_section_begin|>",),),
)
GLM: Final = CallFormat(
    (
        NamedCall(
            Parameters(("<arg_key>",), ("</arg_key>",), ("</arg_value>",), value_opened=("<arg_value>",)),
            until=("<arg_key>", "</tool_call>"),
        ),
    ),
    opened=("<tool_call>",),
    closed=("</tool_call>",),
    ends_thought=True,
    shown_by=(("<arg_key>",),),
)


def _gemma_values(quote: str) -> Values:
    words = {"None": "null", **JSON.words}
    literals = Literals(words, raw_quotes=(quote,), has_bare_keys=True, has_bare_strings=True)
    return Values(literals, OBJECT, are_keys_sorted=True)


GEMMA4: Final = CallFormat(
    (
        NamedCall(
            _gemma_values('<|"|>'),
            before=("call:", ":", ""),
        ),
    ),
    opened=("<|tool_call>",),
    closed=("<tool_call|>",),
    shown_by=(("<|tool_call>",),),
)
FUNCTION_GEMMA: Final = CallFormat(
    (
        NamedCall(
            _gemma_values("<escape>"),
            before=("call:", ""),
        ),
    ),
    opened=("<start_function_call>",),
    closed=("<end_function_call>",),
    shown_by=(("<start_function_call>",),),
)
GRANITE: Final = CallFormat(
    (JsonCall(),),
    opened=("<tool_call>", "<|tool_call|>"),
    closed=("</tool_call>",),
    is_list=True,
    shown_by=(("<|tool_call|>",),),
)
PHI4_MINI: Final = CallFormat(
    (JsonCall(),),
    opened=("functools", "<|tool_call|>"),
    closed=("<|/tool_call|>",),
    is_list=True,
    shown_by=(("functools[",), ("<|tool|>", "<|/tool|>")),
)
_MINIMAX_NAME: Final = ('name="', "name='", "name=")
_MINIMAX_NAMED: Final = ('">', "'>", ">")
MINIMAX_M2: Final = CallFormat(
    (
        NamedCall(
            Parameters(tuple(f"<parameter {name}" for name in _MINIMAX_NAME), _MINIMAX_NAMED, ("</parameter>",)),
            before=tuple(f"<invoke {name}" for name in _MINIMAX_NAME),
            after=_MINIMAX_NAMED,
            closed=("</invoke>",),
        ),
    ),
    section_opened=("<minimax:tool_call>",),
    section_closed=("</minimax:tool_call>",),
    ends_thought=True,
    shown_by=(("<minimax:tool_call>",),),
)
GENERIC_JSON: Final = CallFormat((JsonCall(),), is_list=True, bare="{[")
HARMONY: Final = Channels(
    started="<|start|>",
    channel="<|channel|>",
    constrained="<|constrain|>",
    message="<|message|>",
    ended=("<|end|>", "<|call|>", "<|return|>"),
    reasoning="analysis",
    tool_prefix="functions.",
    shown_by=(("<|channel|>", "<|message|>"),),
)

FORMATS: Final[dict[str, CallFormat | Channels]] = {
    "gemma4": GEMMA4,
    "openai": HARMONY,
    "kimi_k2": KIMI_K2,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "deepseek_v32": DEEPSEEK_DSML,
    "deepseek_v4": DEEPSEEK_DSML,
    "deepseek_v41": DEEPSEEK_DSML,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "glm45": GLM,
    "glm47": GLM,
    "ling3": GLM,
    "poolside_v1": GLM,
    "seed_oss": SEED,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
    "step3p5": QWEN3_CODER,
    "functiongemma": FUNCTION_GEMMA,
    "phi4_mini_json": PHI4_MINI,
    "granite": GRANITE,
    "olmo3": OLMO3,
    "lfm2": LFM2,
    "nemotron_json": NEMOTRON,
    "hunyuan_a13b": TOOL_CALLS,
    "jamba": TOOL_CALLS,
    "internlm": INTERNLM,
    "longcat": LONGCAT,
    "gigachat3": GIGACHAT3,
    "minicpm5": MINICPM5,
    "pythonic": PYTHONIC,
    "llama4_pythonic": PYTHONIC,
    "hermes": HERMES,
    "qwen3_json": HERMES,
    "granite4": HERMES,
    "ernie45": HERMES,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "json": GENERIC_JSON,
    "xlam": GENERIC_JSON,
}
"""The first one that a template shows is the model's."""

THINK: Final = ReasoningFormat(("<think>",), ("</think>",), shown_by=(("<think>",), ("</think>",)))
MISTRAL_THINK: Final = ReasoningFormat(
    ("[THINK]", "<think>"), ("[/THINK]", "</think>"), is_anywhere=True, shown_by=(("[THINK]",),)
)
GEMMA4_THINK: Final = ReasoningFormat(
    ("<|channel>thought",), ("<channel|>",), is_anywhere=True, shown_by=(("<|channel>",), ("<channel|>",))
)
SEED_THINK: Final = ReasoningFormat(("<seed:think>",), ("</seed:think>",), shown_by=(("<seed:think>",),))
GRANITE_THINK: Final = ReasoningFormat(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    shown_by=(("Here is my thought process:",),),
)

REASONING: Final[dict[str, ReasoningFormat | Channels]] = {
    "gemma4": GEMMA4_THINK,
    "openai_gptoss": HARMONY,
    "mistral": MISTRAL_THINK,
    "seed_oss": SEED_THINK,
    "granite": GRANITE_THINK,
    "qwen3": THINK,
    "deepseek_r1": THINK,
    "deepseek_v3": THINK,
    "deepseek_v4": THINK,
    "glm45": THINK,
    "kimi_k2": THINK,
    "minimax_m2": THINK,
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "step3": THINK,
    "step3p5": THINK,
}
"""The first one that a template shows is the model's."""
