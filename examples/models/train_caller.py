"""Train a tiny model that calls tools, in seconds, in the format of another: see FORMATS.

    python train_caller.py kvasir-caller --format hermes

It knows the tools `weather` and `time` of one `city`, thinks before it answers unless `enable_thinking` is false, and
says what a tool's result means. It calls nothing that it was not given. `--prefix` stands before the tools' names, as
coding agents have those of MCP servers.
"""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch.nn import functional
from train import build_optimizers, save, set_learning_rate
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vocabulary import END_OF_TEXT_ID, TURN_END_ID, train_tokenizer

MAX_POSITION = 1024
NUM_ROWS = 32
NUM_TALKS = 2000
NOT_LEARNED = -100
SEED = 20
LEARNING_RATE = 5e-3
CITIES = (
    "Athens", "Berlin", "Cairo", "Delhi", "Geneva", "Lima", "London", "Madrid", "Oslo", "Paris", "Prague", "Quito",
    "Rome", "Seoul", "Tokyo", "Vienna",
)  # fmt: skip
TOOLS = ("weather", "time")
CANNOT = "I cannot look that up."
HELLO = "Hello!"


@dataclass(frozen=True)
class Format:
    call: str
    """A call `f`, as a Jinja template has it."""
    marks: tuple[str, ...] = ()
    """Texts that are one token."""
    are_special: bool = False
    before: str = ""
    """Of all calls."""
    between: str = ""
    after: str = ""


FORMATS = {
    "hermes": Format(
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
        ("<tool_call>", "</tool_call>"),
        between="\n",
    ),
    "qwen3_coder": Format(
        "<tool_call>\n<function={{ f.name }}>\n{% for key, value in f.arguments | items %}<parameter={{ key }}>\n"
        "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>"),
        between="\n",
    ),
    "llama3_json": Format(
        '{# "parameters": dictionary of argument name #}'
        '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        between="; ",
    ),
    "pythonic": Format(
        "{{ f.name }}({% for key, value in f.arguments | items %}{{ key }}='{{ value }}'{% endfor %})",
        ("<|python_start|>", "<|python_end|>"),
        True,
        before="<|python_start|>[",
        between=", ",
        after="]<|python_end|>",
    ),
    "mistral": Format(
        "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ("[TOOL_CALLS]", "[ARGS]"), are_special=True
    ),
    "kimi_k2": Format(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        True,
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "glm45": Format(
        "<tool_call>{{ f.name }}\n{% for key, value in f.arguments | items %}<arg_key>{{ key }}</arg_key>\n"
        "<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>",
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        between="\n",
    ),
    "gemma4": Format(
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for key, value in f.arguments | items %}{{ key }}:"
        """<|"|>{{ value }}<|"|>{% endfor %}{{ '}' }}<tool_call|>""",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        are_special=True,
    ),
    "minimax_m2": Format(
        '<invoke name="{{ f.name }}">\n{% for key, value in f.arguments | items %}<parameter name="{{ key }}">'
        "{{ value }}</parameter>\n{% endfor %}</invoke>\n",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        True,
        before="<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
}
THINK = ("<think>", "</think>")


def template_of(how: Format) -> str:
    """ChatML as Qwen has it, with the names of tools alone."""
    before, between, after = (text.replace("\n", "{{ '\\n' }}") for text in (how.before, how.between, how.after))
    return f"""
{{%- if tools %}}{{{{- '<|im_start|>system\nTools:' }}}}
    {{%- for tool in tools %}}{{{{- ' ' + tool.function.name }}}}{{%- endfor %}}{{{{- '<|im_end|>\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
    {{{{- '<|im_start|>' + message.role + '\n' }}}}
    {{%- if message.reasoning_content %}}
        {{{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}}}
    {{%- endif %}}
    {{{{- message.content }}}}
    {{%- if message.tool_calls -%}}
        {before}
        {{%- for call in message.tool_calls -%}}
            {{%- set f = call.function -%}}
            {{%- if not loop.first -%}}{between}{{%- endif -%}}
            {how.call}
        {{%- endfor -%}}
        {after}
    {{%- endif %}}
    {{{{- '<|im_end|>\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\n' }}}}
    {{%- if enable_thinking is defined and not enable_thinking %}}{{{{- '<think>\n\n</think>\n\n' }}}}{{%- endif %}}
{{%- endif %}}"""


@dataclass(frozen=True)
class Talk:
    """A prompt, and what is to be learned."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answer: dict[str, Any]
    thought: str | None


def draw_talk(draw: random.Random, prefix: str) -> Talk:
    offered = draw.sample(TOOLS, draw.choice((0, 1, 2, 2, 2)))
    tools = [{"type": "function", "function": {"name": prefix + name}} for name in offered]
    asked, cities = draw.choice(TOOLS), draw.sample(CITIES, draw.choice((1, 1, 2)))
    question = f"What is the {asked} in {' and '.join(cities)}?"
    user = {"role": "user", "content": question}
    calls = [{"type": "function", "function": {"name": prefix + asked, "arguments": {"city": city}}} for city in cities]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    messages, thought = [user], f"The {asked} in {' and '.join(cities)}."
    kind = draw.random()
    if kind < 0.15:
        messages, thought = [{"role": "user", "content": draw.choice(("Hello", "Hi", "Say hello."))}], "A greeting."
        answer = {"role": "assistant", "content": HELLO}
    elif asked not in offered:
        answer = {"role": "assistant", "content": CANNOT}
    elif kind < 0.7:
        answer = calling
    else:
        city, calling["tool_calls"] = cities[0], calls[:1]
        if draw.random() < 0.5:
            calling["reasoning_content"] = f"The {asked} in {city}."
        result = f"{draw.randrange(10, 30)}"
        messages = [{"role": "user", "content": f"What is the {asked} in {city}?"}, calling]
        messages.append({"role": "tool", "content": result})
        thought = f"The result is {result}."
        answer = {"role": "assistant", "content": f"The {asked} in {city} is {result}."}
    return Talk(messages, tools, answer, thought if draw.random() < 0.5 else None)


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(SEED)
    how = FORMATS[arguments.format]
    draw = random.Random(SEED)
    talks = [draw_talk(draw, arguments.prefix) for _ in range(NUM_TALKS)]
    tokenizer = tokenizer_of(how, talks)
    tokenizer.save_pretrained(arguments.folder)
    rows = [row_of(talk, tokenizer) for talk in talks]
    model = build_model(len(tokenizer))
    loss = train(model, rows, arguments.steps)
    save(model, arguments.folder)
    print(f"{model.num_parameters()} parameters, loss {loss:.4f} after {arguments.steps} steps of {NUM_ROWS} rows")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=sorted(FORMATS), default="hermes")
    parser.add_argument("--prefix", default="", help="of the tools' names")
    parser.add_argument("--steps", type=int, default=600)
    return parser.parse_args()


def tokenizer_of(how: Format, talks: list[Talk]) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer([], MAX_POSITION)
    tokenizer.chat_template = template_of(how)
    tokenizer = train_tokenizer(["".join(texts_of(talk, tokenizer)) for talk in talks], MAX_POSITION)
    tokenizer.chat_template = template_of(how)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in THINK])
    tokenizer.add_tokens([AddedToken(mark, special=how.are_special, normalized=False) for mark in how.marks])
    return tokenizer


def texts_of(talk: Talk, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The prompt, and what is answered."""
    options: dict[str, Any] = {"tools": talk.tools or None, "tokenize": False}
    thinks = {} if talk.thought is not None else {"enable_thinking": False}
    prompt = str(tokenizer.apply_chat_template(talk.messages, add_generation_prompt=True, **options, **thinks))
    begun = str(tokenizer.apply_chat_template(talk.messages, add_generation_prompt=True, **options))
    answer = talk.answer | {"reasoning_content": talk.thought}
    whole = str(tokenizer.apply_chat_template([*talk.messages, answer], **options))
    return prompt, whole.removeprefix(begun)


def row_of(talk: Talk, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], int]:
    """Its token ids, and how many of them are the prompt's."""
    prompt, answer = (tokenizer.backend_tokenizer.encode(text).ids for text in texts_of(talk, tokenizer))
    return prompt + answer, len(prompt)


def build_model(vocab_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_POSITION, tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID, eos_token_id=TURN_END_ID, pad_token_id=END_OF_TEXT_ID,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID, eos_token_id=[END_OF_TEXT_ID, TURN_END_ID]
    )
    return model


def train(model: LlamaForCausalLM, rows: list[tuple[list[int], int]], num_steps: int) -> float:
    """Returns the last steps' mean loss."""
    optimizers = build_optimizers(model, LEARNING_RATE)
    draw = random.Random(SEED)
    average = 0.0
    for step in range(num_steps):
        set_learning_rate(optimizers, step / num_steps)
        loss = loss_of(model, draw.sample(rows, NUM_ROWS))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
    return average


def loss_of(model: LlamaForCausalLM, rows: list[tuple[list[int], int]]) -> torch.Tensor:
    """Of what follows the prompts."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), longest), END_OF_TEXT_ID)
    targets = torch.full((len(rows), longest), NOT_LEARNED)
    for number, (row, num_prompt) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        targets[number, num_prompt : len(row)] = torch.tensor(row[num_prompt:])
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten(), ignore_index=NOT_LEARNED)


if __name__ == "__main__":
    main()
