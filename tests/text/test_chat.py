# ruff: noqa: E501  (templates on one line)
"""Templates: Hugging Face's conventions, and bounds on what a stranger's template can do."""

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import MAX_TEMPLATE_BYTES, ChatTemplate

MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yes"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(MESSAGES, add_generation_prompt=True, variables=variables)


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{% for m in messages %}\n{{ m['role'] }}:{{ m.content | trim }};{% endfor %}", "user:hi;assistant:yes;"),
        ("  {% if add_generation_prompt %}\nA\n  {% endif %}\nB", "A\nB"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "13"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [1, 2] if i > 1 %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{% endfor %}", "11True"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) ~ m('b') }}", "[1][b]"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[1:][0].role }}{{ messages[::-1][0].role[:4] }}", "assistantassi"),
        ("{{ 'a,b'.split(',') | map('upper') | join('-') }}{{ ' '.join(['c', 'd']) }}", "A-Bc d"),
        ("{{ '%s-%d' | format('a', 3) }}{{ '%s' % 'b' }}{{ '{}{}'.format(1, 'c') }}", "a-3b1c"),
        ("{{ tools is none }}{{ documents is defined }}{{ missing is defined }}", "TrueTrueFalse"),
        ("{{ 'x' in 'xyz' }}{{ 'user' in messages[0].values() }}{{ '-' * 3 }}{{ 2 ** 3 }}", "TrueTrue---8"),
        ("{{ bos_token }}{{ flag }}", "<s>1"),
    ],
)  # fmt: skip
def test_a_template_renders_as_hugging_face_would(source: str, wanted: str) -> None:
    assert render(source, bos_token="<s>", flag=1) == wanted


def test_the_date_is_given_to_templates_that_ask() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2026-01-31")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('Only user turns') }}", "Only user turns"),
        ("{{ messages[0].content.foo.bar }}", "has no attribute 'foo'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages['x' ~ 1]['y'] }}", "has no attribute 'x1'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% set ns = namespace(a=1) %}{% set ns._b = 1 %}", "cannot hold '_b'"),
        ("{% set ns = namespace(_a=1) %}", "cannot hold '_a'"),
        ("{% include 'x' %}", "no loader"),
        ("{% if %}", "Expected an expression"),
        ("{{ 'a'.encode().center(9) }}", "str.encode is not supported in templates"),
        (r"{{ '\ud800' }}", "surrogates not allowed"),
        (r"{{ raise_exception('a\n \x1b[31mb') }}", r"conversation: a �\[31mb; change"),
    ],
)
def test_what_a_template_raises_is_told_to_the_caller(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        render(source)
    assert caught.value.field == "chat"


def test_what_a_template_raises_is_cut_to_a_length_that_fits_a_header() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ raise_exception('x' * 1000000) }}")
    assert 500 < len(str(caught.value)) < 700


def test_a_long_conversation_has_the_budget_it_needs() -> None:
    messages = [{"role": "user", "content": "x" * 4000} for _ in range(1024)]
    source = (
        "{% for m in messages %}{% if loop.index0 != messages | length and m.content | trim %}"
        "{{ '<' ~ m['role'] ~ '>' + m.content | trim | replace('a', 'b') }}{% endif %}{% endfor %}"
    )
    text = ChatTemplate(source).render(messages, add_generation_prompt=True, variables={})
    assert len(text) == 1024 * 4006


def test_a_template_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_TEMPLATE_BYTES}"):
        ChatTemplate("x" * (MAX_TEMPLATE_BYTES + 1))


def test_a_callers_variable_cannot_replace_the_messages() -> None:
    with pytest.raises(InvalidRequestError, match="messages, which is not a free name"):
        render("x", messages=[])
