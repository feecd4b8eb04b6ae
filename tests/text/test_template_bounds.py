# ruff: noqa: E501  (templates on one line)
"""A stranger's template cannot take more than its share of time and memory."""

import time

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.text.chat import ChatTemplate

BIG = "{% set xs = range(100000) | list %}"
DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"  # fmt: skip
BOMBS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% for c in range(100000) %}{% endfor %}{% endfor %}{% endfor %}",
    "a loop whose filter is never true": "{% for a in range(100000) %}{% for b in range(100000) if false %}x{% endfor %}{% endfor %}",
    "a recursive loop": "{% for m in range(9) recursive %}{% if loop.depth < 9 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "a list filter in a loop": "{% for a in range(100000) %}{% if range(100000) | list %}{% endif %}{% endfor %}",
    "searching a list in a loop": BIG + "{% for a in xs %}{% if -1 in xs %}{% endif %}{% endfor %}",
    "slicing in a loop": BIG + "{% for a in xs %}{% set y = xs[1:] %}{% endfor %}",
    "slicing text in a loop": "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% set x = s[::-1] %}{% endfor %}",
    "searching text in a loop": "{% set s = 'a' * 1000000 %}{% for i in range(100000) %}{% if 'ab' in s %}{% endif %}{% endfor %}",
    "a tree of macro calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "doubled text": DOUBLING % ("'a'", "ns.x + ns.x", ""),
    "joined text": DOUBLING % ("'a'", "ns.x ~ ns.x", ""),
    "a doubled list": DOUBLING % ("[1]", "ns.x + ns.x", " | length"),
    "a list that holds itself twice, written": DOUBLING % ("[1]", "[ns.x, ns.x]", ""),
    "a list that holds itself twice, as JSON": DOUBLING % ("[1]", "[ns.x, ns.x]", " | tojson"),
    "squared numbers": DOUBLING % ("9", "ns.x * ns.x", ""),
    "a power": "{{ 9 ** 999999 }}",
    "multiplied text": "{{ 'a' * 10 ** 9 }}",
    "a multiplied list": "{{ ([1] * 10 ** 9) | length }}",
    "a wide method": "{{ 'a'.center(10 ** 9) }}",
    "a wide number": "{{ (1).to_bytes(10 ** 9, 'big') | length }}",
    "a wide number by name": "{{ (1).to_bytes(length=10 ** 9, byteorder='big') | length }}",
    "a wide filter": "{{ 'a' | center(10 ** 9) }}",
    "a wide format": "{{ '{:1000000000}'.format(3) }}",
    "a nested format": "{{ '{:{}}'.format(3, 10 ** 9) }}",
    "a wide % format": "{{ '%1000000000d' % 3 }}",
    "a % format with a star": "{{ '%*d' % (10 ** 9, 3) }}",
    "literal text in a captured loop": "{% set x %}{% for i in range(100000) %}" + "y" * 1000 + "{% endfor %}{% endset %}{{ x | length }}",
    "long replacements": "{% set b = 'a' * 1000000 %}{{ b.replace('a', b) }}",
    "long replacements by a filter": "{% set b = 'a' * 1000000 %}{{ b | replace('a', b) }}",
    "a long separator": "{{ ('a' * 1000000).join(range(100000) | map('string')) }}",
    "a long separator in a filter": "{{ range(100000) | join('a' * 1000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_does_too_much_is_stopped(name: str) -> None:
    began_s = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"more than|too large|recursion"):
        ChatTemplate(BOMBS[name]).render([], add_generation_prompt=True, variables={})
    # The work is bounded by counting, not by the clock; this only sees a bound that is missing.
    assert time.process_time() - began_s < 20
