"""What a chat template shows of a model's talk."""

import pytest

from kvasir_runtime.talk.detection import detect_calls, detect_reasoning
from kvasir_runtime.talk.formats import FORMATS, REASONING
from kvasir_runtime.talk.parser import is_thought_open

BAR = "\uff5c"
TEMPLATES = [
    ("qwen 2.5", '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}', "hermes", None),
    ("qwen 3", '<tool_call>\\n{"name": </tool_call> <think>\\n\\n</think>', "hermes", "qwen3"),
    ("qwen 3 coder", "<tool_call>\\n<function=example>\\n<parameter=example_1>", "qwen3_coder", None),
    ("llama 3.1", '{"name": function name, "parameters": dictionary of argument name and', "llama3_json", None),
    ("mistral", "[AVAILABLE_TOOLS] [TOOL_CALLS] [THINK]", "mistral", "mistral"),
    ("deepseek r1", f"<{BAR}tool▁sep{BAR}>' + name + '\\n' + '```json' </think>", "deepseek_v3", "qwen3"),
    ("deepseek v3.1", f"<{BAR}tool▁sep{BAR}> </think>", "deepseek_v31", "qwen3"),
    ("kimi", "<|tool_calls_section_begin|> <think></think>", "kimi_k2", "qwen3"),
    ("glm", "<tool_call>{name}\\n<arg_key> <think></think>", "glm45", "qwen3"),
    ("gpt-oss", "<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ("gemma 4", "<|tool_call>call: <|channel>thought", "gemma4", "gemma4"),
    ("functiongemma", "<start_function_call>call:", "functiongemma", None),
    ("granite 3.0", "<|tool_call|> Here is my thought process:", "granite", "granite"),
    ("minimax", "<minimax:tool_call> <think>", "minimax_m2", "qwen3"),
    ("apriel 1.5", '<tool_call> {"name": <tool_calls>[ ]</tool_calls>', "hunyuan_a13b", None),
    ("nemotron", "<TOOLCALL>[ </think> <think>", "nemotron_json", "qwen3"),
    ("lfm 2", "<|tool_list_start|>", "lfm2", None),
    ("lfm 2.5", "<|tool_call_start|>", "lfm2", None),
    ("internlm", "<|action_start|>", "internlm", None),
    ("longcat", "<longcat_tool_call>", "longcat", None),
    ("gigachat", "<|function_call|>", "gigachat3", None),
    ("minicpm 5", '<function name="a"><param name="b">', "minicpm5", None),
    ("plain", "{{ message.content }}<|im_end|>", None, None),
]


@pytest.mark.parametrize(("template", "calls", "reasoning"), [t[1:] for t in TEMPLATES], ids=[t[0] for t in TEMPLATES])
def test_a_template_shows_its_formats(template: str, calls: str | None, reasoning: str | None) -> None:
    assert detect_calls(template) == calls
    assert detect_reasoning(template) == reasoning


def test_without_a_template_the_vocabulary_shows_them() -> None:
    assert detect_calls("", ["a", f"{BAR}DSML{BAR}"]) == "deepseek_v32"
    assert detect_reasoning("", ["<think>", "</think>"]) == "qwen3"
    assert detect_calls("{{ message.content }}", ["<tool_call>"]) is None


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nSo far", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_tells_whether_a_thought_is_open(prompt: str, is_open: bool) -> None:
    assert is_thought_open(REASONING["qwen3"], prompt) == is_open
    assert not is_thought_open(REASONING["openai_gptoss"], prompt)


def test_every_format_can_be_shown_or_is_named() -> None:
    assert [name for name, calls in FORMATS.items() if not calls.shown_by] == ["json", "xlam"]
