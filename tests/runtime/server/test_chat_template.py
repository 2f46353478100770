"""Chat templates see what transformers shows them."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvasir_runtime.errors import ConfigurationError, InvalidRequestError
from kvasir_runtime.server.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "größer?  "},
    {"role": "assistant", "content": " It is "},
]
TEMPLATES = {
    "plain": "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ bos_token }}",
    "trimming": "{% for m in messages %}\n    {%- if m.role != 'system' %}\n"
    "    {{ m['content'] | trim }}|\n    {%- endif %}\n"
    "{% endfor %}\n{% if add_generation_prompt %}go{% endif %}",
    "features": "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{{ {'role': m.role, 'x': '<é>'} | tojson }}{{ m.content }}"
    "{% endfor %}{{ ns.n }}{{ tools is none }}{{ flag }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
}


def render(source: str, *, continue_final_message: bool = False, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(
        MESSAGES,
        add_generation_prompt=not continue_final_message,
        continue_final_message=continue_final_message,
        variables=variables,
    )


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_that_of_transformers(name: str, continues: bool) -> None:
    rendered, _ = render_jinja_template(
        [MESSAGES],
        chat_template=TEMPLATES[name],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        bos_token="<s>",
        flag=True,
    )
    assert render(TEMPLATES[name], continue_final_message=continues, flag=True) == rendered[0]


def test_words_of_a_template_that_refuses_reach_the_client() -> None:
    with pytest.raises(InvalidRequestError, match="only two roles"):
        render("{{ raise_exception('only two roles') }}")


def test_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("{{ messages[0].content }}", continue_final_message=True)


def test_templates_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_template_that_is_no_jinja_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        ChatTemplate("x\n{% for %}", {})
