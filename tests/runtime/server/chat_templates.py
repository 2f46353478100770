# ruff: noqa: E501 - lines of templates
"""Chat templates in the shapes that checkpoints come with, each written for these tests, and conversations."""

from typing import Any

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "chatml, tools in the system turn": """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- if ns.searching and m.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if m.reasoning_content is string and loop.index0 > ns.last_query %}
            {{- '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "headers": """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + date_string + '\n\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "inst": """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + ' [/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- elif message['role'] == 'tool' %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}
            {%- set content = message.content %}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('user and assistant roles only, with an optional system message first') }}
    {%- endif %}
{%- endfor %}""",
    "parts by a macro": """
{%- macro render(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is none -%}
    {%- else -%}
        {%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for m in messages %}[{{ m.role }}]{{ render(m.content) }}{% for call in m.tool_calls or [] %}
<call>{{ call.function.name }}{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</call>
{%- endfor %}[/{{ m.role }}]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}""",
    "parts alone": "{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson(indent=2) }}{% endfor %}</{{ m.role }}>{% endfor %}",
    "parts by filters": "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(' ') }}{% endif %}\n{% endfor %}",
    "first part": "{% for m in messages %}{% if m.content[0].text is defined %}{{ m.role }}={{ m.content[0].text }};"
    "{% endif %}{% endfor %}",
    "turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' if messages[0]['content'] is string else messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('roles must alternate user/assistant') }}
    {%- endif -%}
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- else -%}{{ raise_exception('invalid content') }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}""",
    "channels": """
{%- macro effort() %}{{ reasoning_effort | default('medium') }}{% endmacro -%}
<|start|>system<|message|>Reasoning: {{ effort() }}<|end|>
{%- set developer = messages[0].content if messages[0].role in ['developer', 'system'] else '' -%}
{%- if developer %}<|start|>developer<|message|># Instructions

{{ developer }}<|end|>{% endif -%}
{%- set last_tool_call = namespace(name=none) -%}
{%- for message in messages -%}
    {%- if message.role in ['developer', 'system'] %}{% continue %}{% endif -%}
    {%- if message.role == 'assistant' -%}
        {%- if 'tool_calls' in message -%}
            {%- set call = message.tool_calls[0].function -%}
            {%- if message.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif -%}
            <|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
            {%- set last_tool_call.name = call.name -%}
        {%- else -%}
            <|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
        {%- endif -%}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{ raise_exception('a tool message follows a call') }}{% endif -%}
        <|start|>functions.{{ last_tool_call.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
    {%- else -%}
        <|start|>user<|message|>{{ message.content }}<|end|>
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}""",
    "null decides": """
{%- set ns = namespace(is_first=true, is_tool=false) -%}{{ bos_token }}
{%- for message in messages -%}
    {%- if message['role'] == 'system' %}{{ message['content'] }}{% endif -%}
    {%- if message['role'] == 'user' %}{% set ns.is_tool = false %}{{ '<|User|>' + message['content'] }}{% endif -%}
    {%- if message['role'] == 'assistant' and message['content'] is none -%}
        {%- set ns.is_tool = false -%}
        {%- for tool in message['tool_calls'] -%}
            {{ '<|Assistant|><|calls|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<|end|>' }}
        {%- endfor -%}
    {%- endif -%}
    {%- if message['role'] == 'assistant' and message['content'] is not none -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif -%}
        {{ '<|Assistant|>' + content + eos_token }}
    {%- endif -%}
    {%- if message['role'] == 'tool' %}{{ '<|output|>' + message['content'] }}{% set ns.is_tool = true %}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|><think>\n' }}{% endif -%}""",
    "phi": "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "generation": """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set mark = 'outer' %}
        {% generation %}
        {%- set mark = 'inner' %}
        {{- message.content }}{{ mark }}
        {%- endgeneration %}
        {{- mark }}
    {%- else %}
        {{- message.role }}: {{ message.content }}
    {%- endif %}
    {%- if loop.index >= 40 %}{% break %}{% endif %}
{%- endfor %}""",
    "documents": "{% if documents %}<documents>{% for document in documents %}{{ loop.index }} {{ document.title }}: "
    "{{ document['text'] }}\n{% endfor %}</documents>{% endif %}{% for m in messages %}{{ m.content or '' }}|{% endfor %}"
    "{{ documents is none }}{{ tools is none }}",
    "everything of Jinja": "{% set c = cycler('odd', 'even') %}{% set j = joiner(', ') %}{% for m in messages %}{{ j() }}"
    "{{ c.next() }} {{ dict(role=m.role) | tojson(sort_keys=true, separators=(',', ':')) }}"
    "{{ (m.content or '') | replace('\n', ' ') | upper | truncate(30) | indent(2) }}{{ loop.cycle('a', 'b') }}"
    "{% filter lower %}{{ m.role }}{% endfilter %}{% endfor %}{% for i in range(3) %}{{ i }}{% endfor %}"
    "{% macro f(x, y=2) %}{{ x * y }}{% endmacro %}{{ f(3) }}{% call(u) g() %}{{ u }}{% endcall %}"
    "{% macro g() %}{{ caller('!') }}{% endmacro %}{{ {'é': '<&>'} | tojson }}{{ strftime_now('%Y') }}"
    "{{ messages | map(attribute='role') | unique | list | length }}{{ namespace(a=1).a }}{{ 7 // 2 }}{{ 'a' ~ 1 }}"
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[0].items() | list | length > 0 }}",
    "refuses": "{{ raise_exception('not today') }}",
}

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "<é>"}'}}
QUESTION = {"role": "user", "content": "What is 1 + 2?  \n"}
TOOL = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [QUESTION],
    "system": [{"role": "system", "content": " Be <brief> & kind. "}, QUESTION],
    "developer": [{"role": "developer", "content": "Be brief."}, QUESTION],
    "answer": [QUESTION, {"role": "assistant", "content": " It is 3. "}],
    "turns": [QUESTION, {"role": "assistant", "content": "3"}, {"role": "user", "content": "größer? 日本 😀"}],
    "two users": [QUESTION, QUESTION],
    "call, null": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]}, TOOL],
    "call, no content": [
        QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        TOOL,
        {"role": "assistant", "content": "3"},
    ],
    "call, empty": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL],
    "call, text": [QUESTION, {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}, TOOL],
    "two calls": [QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, TOOL, TOOL],
    "no answer": [QUESTION, {"role": "assistant", "content": None}, QUESTION],
    "parts": [{"role": "user", "content": PARTS}],
    "parts of all": [
        {"role": "system", "content": PARTS},
        {"role": "user", "content": PARTS},
        {"role": "assistant", "content": PARTS},
    ],
    "one part": [{"role": "user", "content": PARTS[:1]}],
    "tool's parts": [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        TOOL | {"content": PARTS},
        {"role": "assistant", "content": "Three."},
    ],
    "thought": [QUESTION, {"role": "assistant", "content": "3", "reasoning_content": "one and two"}],
    "thought, call": [QUESTION, {"role": "assistant", "content": None, "reasoning": "add", "tool_calls": [CALL]}, TOOL],
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"documents": [{"title": "t", "text": "x"}]},
    {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]},
    {"variables": {"enable_thinking": False, "reasoning_effort": "low", "date_string": "1 Jan 2026"}},
]
