# ruff: noqa: E501  (templates on one line)
"""Small chat templates that write tools as the families of real ones do."""

from collections.abc import Mapping, Sequence
from typing import Final

from jaxserve.text.byte_bpe import build_byte_bpe
from jaxserve.text.pre_kinds import PRE_KINDS
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenType, build_vocabulary

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_HEAD = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
_START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

TEMPLATES: Final[Mapping[str, str]] = {
    "hermes": _HEAD + "{% for m in messages %}" + _TURN + (
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    ) + _START,
    "llama3": (
        _HEAD + "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if 'tool_calls' in m %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
        "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # its calls' arguments are texts, and a turn of calls has no content
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' and m.content is none %}[TOOL_CALLS]["
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
        """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + ', "id": "' + c.id + '"}' }}{{ '' if loop.last else ', ' }}{% endfor %}]</s>"""
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "mistral_newer": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
        "{% endfor %}"
    ),
    "qwen_coder": _HEAD + "{% for m in messages %}" + _TURN + (
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    ) + _START + "{% if enable_thinking is not defined %}<think>\n{% endif %}",
    "tool_less": "{% for m in messages %}" + _TURN + "<|im_end|>\n{% endfor %}" + _START,
    # it tells of <tool_call>, but its calls are a list in other tags
    "other": _HEAD + "No <tool_call>!{% for m in messages %}" + _TURN + (
        "{% if m.tool_calls %}<tool_calls>{{ m.tool_calls | map(attribute='function') | list | tojson }}</tool_calls>"
        "{% endif %}<|im_end|>\n{% endfor %}"
    ) + _START,
}  # fmt: skip


def chat_tokenizer(
    template: str | None,
    *,
    tool_template: str | None = None,
    specials: Sequence[str] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>"),
) -> Tokenizer:
    """Returns a tokenizer of the specials and the 256 bytes."""
    alphabet = [*byte_alphabet()]
    types = [TokenType.CONTROL] * len(specials) + [TokenType.NORMAL] * len(alphabet)
    vocabulary = build_vocabulary([*specials, *alphabet], types=types)
    return Tokenizer.from_backend(
        build_byte_bpe(vocabulary, [], pre=PRE_KINDS["gpt-2"]),
        chat_template=template,
        tool_template=tool_template,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )
