"""Renders a conversation with a model's chat template, which is code from a stranger."""

from collections.abc import Mapping

import jinja2

from jaxserve.errors import InvalidRequestError
from jaxserve.text.budget import Budget
from jaxserve.text.sandbox import BUDGET_KEY, BoundedEnvironment
from jaxserve.text.shield import strings_in

MAX_TEMPLATE_BYTES = 1 << 18
# Three nested loops over range(100000) end after this many rounds, in about half a second.
MAX_STEPS = 1_000_000
# A template may write this much on its own, and this many times what the caller sent.
BASE_CHARS = 4_000_000
CHARS_PER_INPUT_CHAR = 64
_RESERVED = frozenset({"messages", "add_generation_prompt"})
MAX_REASON_CHARS = 500
# What an expression of a template can raise besides jinja2's own errors.
_EVALUATION_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,  # RecursionError among them
    SyntaxError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """A compiled template. Immutable; each rendering has a budget of its own.

    Attributes:
      source: as it was written.
    """

    def __init__(self, source: str) -> None:
        """Raises:
        InvalidRequestError: the template is too long or is not valid Jinja.
        """
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise InvalidRequestError(
                f"the model's chat template has {len(source.encode())} bytes, more than "
                f"{MAX_TEMPLATE_BYTES}; send the prompt as text or token ids",
                field="chat",
            )
        self.source = source
        try:
            self._template = BoundedEnvironment().from_string(source)
        except _EVALUATION_ERRORS as error:
            raise _refusal(error) from error

    def render(
        self,
        messages: object,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Returns the prompt's text.

        Args:
          messages: a list of JSON objects with "role" and "content".
          variables: further names the template sees; "tools" and "documents" are None by default,
            as templates expect.

        Raises:
          InvalidRequestError: the template refused the conversation, failed, or spent its budget.
        """
        if reserved := sorted(_RESERVED & variables.keys()):
            raise InvalidRequestError(
                f"template_kwargs has {reserved[0]}, which is not a free name; remove it",
                field="chat.template_kwargs",
            )
        num_chars = sum(map(len, strings_in([messages, dict(variables)])))
        budget = Budget(steps=MAX_STEPS, chars=BASE_CHARS + CHARS_PER_INPUT_CHAR * num_chars)
        names: dict[str, object] = {"tools": None, "documents": None, **variables}
        names["messages"] = messages
        names["add_generation_prompt"] = add_generation_prompt
        names[BUDGET_KEY] = budget
        try:
            text = "".join(self._template.generate(names))
            text.encode()  # a template can spell half a surrogate pair, which is no text
        except _EVALUATION_ERRORS as error:
            raise _refusal(error) from error
        return text


def _refusal(error: BaseException) -> InvalidRequestError:
    # it goes to terminals and headers, and a stranger's template may have written it
    words = " ".join((str(error) or type(error).__name__)[:MAX_REASON_CHARS].split())
    reason = "".join(char if char.isprintable() else "�" for char in words)
    return InvalidRequestError(
        f"the model's chat template refused the conversation: {reason}; "
        "change the messages, or send the prompt as text or token ids",
        field="chat",
    )
