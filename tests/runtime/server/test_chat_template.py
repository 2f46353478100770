"""Chat templates see what transformers shows them."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvasir_runtime.errors import ConfigurationError, InvalidRequestError
from kvasir_runtime.server.prompts import ChatTemplate

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
    return rendered_by(ChatTemplate(source, {"bos_token": "<s>"}), continue_final_message, **variables)


def rendered_by(template: ChatTemplate, continue_final_message: bool = False, **variables: object) -> str:
    return template.render(
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


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("{{ 1 / divisor }}", {"divisor": 0}),
        ("{{ 2.0 ** exponent }}", {"exponent": 10**6}),
        ("{{ 'a' * number }}", {"number": 10**30}),
        ("{% macro walk(x) %}{{ walk(x) }}{% endmacro %}{{ walk(tree) }}", {"tree": []}),
    ],
)
def test_whatever_goes_wrong_with_a_clients_values_is_told_as_its_request_at_fault(source: str, variables) -> None:
    with pytest.raises(InvalidRequestError, match=r"refuses these messages: ."):
        render(source, **variables)


def test_what_a_template_says_is_told_up_to_a_length() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception(words) }}", words="x" * 10**6)
    assert len(str(caught.value)) < 1000


def test_a_prompt_that_a_clients_variable_makes_enormous_is_refused() -> None:
    """Templates print special tokens with each message, and a client may name its own."""
    source = "{% for m in messages %}{{ m.content }}{{ bos_token }}{% endfor %}"
    num_chars = len(render(source, bos_token="x" * 1000))
    template = ChatTemplate(source, {}, max_chars=num_chars)
    assert len(rendered_by(template, bos_token="x" * 1000)) == num_chars
    with pytest.raises(InvalidRequestError, match=f"made {num_chars + 3} characters .* send fewer messages"):
        rendered_by(template, bos_token="x" * 1001)


def test_a_prompt_that_takes_too_long_to_render_is_refused() -> None:
    source = "{% for entry in custom_tools %}{{ entry | tojson(indent=4) }}{% endfor %}"
    assert render(source, custom_tools=[1] * 1000) == "1" * 1000
    with pytest.raises(InvalidRequestError, match="less in chat_template_kwargs"):
        rendered_by(ChatTemplate(source, {}, max_seconds=0.0), custom_tools=[1] * 1000)


def test_template_that_drops_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        render("{{ messages[0].content }}", continue_final_message=True)


def test_templates_cannot_leave_the_sandbox() -> None:
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_template_that_is_no_jinja_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="line 2"):
        ChatTemplate("x\n{% for %}", {})
