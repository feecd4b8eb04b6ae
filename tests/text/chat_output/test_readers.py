# ruff: noqa: E501  (outputs on one line)
"""What is found in outputs of each form: calls, and all that is none."""

import pytest

from tests.text.chat_output.reading import Part, read

F1 = ("call", "f", '{"n": 1}')
G = ("call", "g.h-1", "{}")

HERMES: list[tuple[str, list[Part]]] = [
    ("Hello", [("content", "Hello")]),
    ("", []),
    ('<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>', [F1]),
    ('Hi\n<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>\n\n<tool_call>{"name": "g.h-1", "arguments": {}}</tool_call>\n', [("content", "Hi"), F1, G]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>\nbye ', [F1, ("content", "\nbye ")]),
    ('<tool_call>{"arguments": {"n": 1}, "name": "f"}</tool_call>', [F1]),
    ('<tool_call>{"id": 7, "name": "f", "type": "function", "parameters": {"n": 1}, "x": [{"}": null}]}</tool_call>', [F1]),
    ('<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>', [F1]),
    ('<tool_call>{"name": "g.h-1", "arguments": null}</tool_call>', [G]),
    ('<tool_call>{"name": "g.h-1"}</tool_call>', [G]),
    ('<tool_call>{"n\\u0061me": "\\u0066", "arguments": {"n": 1}}</tool_call>', [F1]),
    ('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', [("call", "unknown", "{}")]),
    (f"a{' ' * 65}<tool_call>{{\"name\": \"g.h-1\"}}</tool_call>{' ' * 65}", [("content", "a "), G, ("content", " " * 65)]),
    # two in one block
    ('<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n{"name": "g.h-1"}\n</tool_call>', [F1, G]),
    # markers, braces and escapes in strings
    ('<tool_call>{"name": "f", "arguments": {"s": "</tool_call> } \\" \\\\"}}</tool_call>!', [("call", "f", '{"s": "</tool_call> } \\" \\\\"}'), ("content", "!")]),
    ('<tool_call>{"name": "f", "arguments": {"o": {"a": [{}, "]"]}}}</tool_call>', [("call", "f", '{"o": {"a": [{}, "]"]}}')]),
    # what a model forgot, or wrote too much
    ('<tool_call>{"name": "f", "arguments": {"n": 1}}', [F1]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}}}</tool_call>', [F1, ("content", "}")]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1</tool_call> x', [("call", "f", '{"n": 1'), ("content", " x")]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}, "arguments": {}}</tool_call>', [F1, ("content", ': {}}')]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}} and </tool_call><tool_call>{"name": "g.h-1"}</tool_call>', [F1, ("content", " and"), G]),
    ('<tool_call>{"name": "f", "arguments": {"n": 1}} {"no": 1}</tool_call>.', [F1, ("content", ' {"no": 1}.')]),
    # no calls
    ("a < b <tool_cal x", [("content", "a < b <tool_cal x")]),
    ("</tool_call>", [("content", "</tool_call>")]),
    ("<tool_call>\nf(1)\n</tool_call>\n", [("content", "<tool_call>\nf(1)\n</tool_call>\n")]),
    ("Hi \n<tool_call> \n", [("content", "Hi \n<tool_call> \n")]),
    ('<tool_call>[{"name": "f"}]</tool_call>', [("content", '<tool_call>[{"name": "f"}]</tool_call>')]),
    ('<tool_call>{"name": 1, "arguments": {}}</tool_call>', [("content", '<tool_call>{"name": 1, "arguments": {}}</tool_call>')]),
    ('<tool_call>{"name": "", "arguments": {}}</tool_call>', [("content", '<tool_call>{"name": "", "arguments": {}}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [("content", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": "no"}</tool_call>', [("content", '<tool_call>{"name": "f", "arguments": "no"}</tool_call>')]),
    ('<tool_call>{"name": "f", "arguments": nul}</tool_call>', [("content", '<tool_call>{"name": "f", "arguments": nul}</tool_call>')]),
    ('<tool_call>{"arguments": {"n": 1}}</tool_call>', [("content", '<tool_call>{"arguments": {"n": 1}}</tool_call>')]),
    ('<tool_call>{"name": "f\n"}</tool_call>', [("content", '<tool_call>{"name": "f\n"}</tool_call>')]),
    ('<tool_call>{"name": "f", ', [("content", '<tool_call>{"name": "f", ')]),
    ("<tool_call>oh<tool_call> \n{\"name\": \"g.h-1\"}</tool_call>", [("content", "<tool_call>oh"), G]),
]  # fmt: skip

LLAMA3: list[tuple[str, list[Part]]] = [
    ('{"name": "f", "parameters": {"n": 1}}', [F1]),
    ('\n\n{"type": "function", "name": "f", "arguments": {"n": 1}}\n', [F1]),
    ('{"name": "f", "parameters": {"n": 1}}; {"name": "g.h-1", "parameters": {}}', [F1, G]),
    ('{"name": "f", "parameters": {"n": 1}}\n{"name": "f", "parameters": {"n": 1}}', [F1, F1]),
    ('<|python_tag|>{"name": "f", "parameters": {"n": 1}}', [F1]),
    ('See: <|python_tag|> {"name": "unknown", "parameters": {}}', [("content", "See:"), ("call", "unknown", "{}")]),
    # no calls
    ('{"name": "Bob", "parameters": {}}', [("content", '{"name": "Bob", "parameters": {}}')]),
    ('{"name": "f", "age": 3}', [("content", '{"name": "f", "age": 3}')]),
    ('{"name": "f"}', [("content", '{"name": "f"}')]),
    ('I say {"name": "f", "parameters": {}}', [("content", 'I say {"name": "f", "parameters": {}}')]),
    ('{"name": "f", "parameters": {"n": 1}}; then', [F1, ("content", "; then")]),
    ("<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
    ("<|python_tag|>", [("content", "<|python_tag|>")]),
    (" \n", [("content", " \n")]),
    ('{"parameters": {"n": 1}, "name"', [("content", '{"parameters": {"n": 1}, "name"')]),
    ('{"name": "f", "parameters": {"n": ', [("call", "f", '{"n": ')]),
]  # fmt: skip

MISTRAL: list[tuple[str, list[Part]]] = [
    ('[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}]', [F1]),
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abcdefghi"}, {"name": "g.h-1", "arguments": {}}] ok', [F1, G, ("content", " ok")]),
    ('[TOOL_CALLS]{"name": "f", "arguments": {"n": 1}}', [F1]),
    ('[TOOL_CALLS]f[ARGS]{"n": 1}', [F1]),
    ('[TOOL_CALLS]f{"n": 1}[TOOL_CALLS]g.h-1{}', [F1, G]),
    ('Yes\n[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"n": 1}\n[TOOL_CALLS]g.h-1 {}', [("content", "Yes"), F1, G]),
    ('[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]}"} done', [("call", "f", '{"s": "[TOOL_CALLS]}"}'), ("content", " done")]),
    ('[TOOL_CALLS]f[ARGS]{"n": ', [("call", "f", '{"n": ')]),
    # no calls
    ("[TOOL_CALLS][]", [("content", "[TOOL_CALLS][]")]),
    ("[TOOL_CALLS]no call", [("content", "[TOOL_CALLS]no call")]),
    ("[TOOL_CALLS]no call{}", [("content", "[TOOL_CALLS]no call{}")]),
    ("[TOOL_CALLS]f[ARG]{}", [("content", "[TOOL_CALLS]f[ARG]{}")]),
    ("[TOOL_CALLS]f[ARGS][ARGS]{}", [("content", "[TOOL_CALLS]f[ARGS][ARGS]{}")]),
    ("[TOOL_CALLS]f[CALL_ID]a[CALL_ID]b{}", [("content", "[TOOL_CALLS]f[CALL_ID]a[CALL_ID]b{}")]),
    ("x [TOOL_CALLS]?[TOOL_CALLS]g.h-1{}", [("content", "x [TOOL_CALLS]?"), G]),
    ("[TOOL_CALLS]f", [("content", "[TOOL_CALLS]f")]),
    ("[TOOL_CALLS][{\"name\": ", [("content", "[TOOL_CALLS][{\"name\": ")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}} or', [F1, ("content", " or")]),
    ('[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, no', [F1, ("content", ", no")]),
    ("[TOOL] [ARGS]", [("content", "[TOOL] [ARGS]")]),
]  # fmt: skip

QWEN_CODER: list[tuple[str, list[Part]]] = [
    ("<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", [F1]),
    ("Sure\n\n<tool_call>\n<function=g.h-1>\n</function>\n</tool_call>\n<tool_call><function=f><parameter=n>1</parameter></function></tool_call>", [("content", "Sure"), G, F1]),
    ("<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>", [F1]),
    ('<tool_call><function=f><parameter=s>\n "a"\n\tb\\ \n\n</parameter></function></tool_call>', [("call", "f", '{"s": " \\"a\\"\\n\\tb\\\\ \\n"}')]),
    ("<function=f><parameter=s>1</parameter><parameter=n>x</parameter><parameter=o>None</parameter><parameter=z>true</parameter></function>", [("call", "f", '{"s": "1", "n": "x", "o": null, "z": "true"}')]),
    ('<function=f><parameter=o>{"a": [1, "</par"]}</parameter><parameter=n>1.5</parameter></function>', [("call", "f", '{"o": {"a": [1, "</par"]}, "n": "1.5"}')]),
    ("<tool_call><function=f><parameter=n>1</parameter></tool_call> then", [F1, ("content", " then")]),
    ("<tool_call><function=f>stray<parameter=n>1</parameter></function></tool_call>", [("call", "f", '{"n": 1}'), ("content", "stray")]),
    ("<tool_call><function=f><parameter=s>a\nb", [("call", "f", '{"s": "a\\nb')]),
    ("<tool_call><function=f><parameter=s>a\n</param", [("call", "f", '{"s": "a\\n</param')]),
    ("<tool_call><function=f><parameter=n>1", [("call", "f", '{"n": 1')]),
    # no calls
    ("<tool_call>\n{}</tool_call>", [("content", "<tool_call>\n{}</tool_call>")]),
    ("<tool_call>\n<funct", [("content", "<tool_call>\n<funct")]),
    ("a <function= f></function>", [("content", "a <function= f></function>")]),
    ("<function=></function>", [("content", "<function=></function>")]),
    ("<tool_call><function=f<function=g.h-1></function>", [("content", "<tool_call><function=f"), G]),
    ("<parameter=n>1</parameter>", [("content", "<parameter=n>1</parameter>")]),
]  # fmt: skip

CORPUS = [
    (form, text, parts)
    for form, outputs in {
        "hermes": HERMES, "llama3": LLAMA3, "mistral": MISTRAL, "qwen_coder": QWEN_CODER,
    }.items()
    for text, parts in outputs
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "parts"), CORPUS)
def test_calls_are_found_and_the_rest_is_content(form: str, text: str, parts: list[Part]) -> None:
    assert read(text, form) == parts
