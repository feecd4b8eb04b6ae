"""One model's chat templates, and which of them a conversation takes."""

import functools
from collections.abc import Mapping

from jaxserve.errors import InvalidRequestError, NoChatTemplateError, UnsupportedError
from jaxserve.request import ChatPrompt
from jaxserve.text.chat import ChatTemplate
from jaxserve.text.messages import TemplateTraits, find_traits, plain_traits


class ChatTemplates:
    """The templates of a model, compiled and probed when they are first wanted.

    Attributes:
      default: source; None where the model has none.
      for_tools: source that takes the default's place where there are tools; None for most.
    """

    def __init__(
        self, default: str | None, for_tools: str | None, *, named_tokens: Mapping[str, str]
    ) -> None:
        """Args:
        named_tokens: what templates see, such as {"bos_token": "<s>"}.
        """
        self.default = default
        self.for_tools = for_tools
        self._named_tokens = named_tokens

    @property
    def has_tools(self) -> bool:
        """Whether the model is told of tools; a broken template tells nothing."""
        traits = self._probe()
        return traits is not None and traits.renders_tools

    @property
    def probed_call(self) -> str:
        """How a call of the probed function is rendered; empty where it is not."""
        traits = self._probe()
        return "" if traits is None else traits.called

    def choose(self, prompt: ChatPrompt) -> tuple[ChatTemplate, TemplateTraits]:
        """Returns the template for a conversation with its traits.

        Raises:
          NoChatTemplateError: there is none.
          InvalidRequestError: it is no valid one.
          UnsupportedError: tools, and a template that does not know of them.
        """
        if prompt.tools:
            if not self._tool_traits.renders_tools:
                raise UnsupportedError(
                    "the conversation has tools, but this model's chat template has no place for "
                    "them; leave them out, or serve the model with a template that has",
                    field="chat.tools",
                )
            return self._tool_template, self._tool_traits
        has_calls = any(message.tool_calls for message in prompt.messages)
        return self._template, self._traits if has_calls else plain_traits(self._template.source)

    def _probe(self) -> TemplateTraits | None:
        """Returns what is known of conversations with tools; None without a valid template."""
        try:
            return None if self.default is None else self._tool_traits
        except InvalidRequestError:  # each conversation is refused with the reason
            return None

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return _compile(self.default)

    @functools.cached_property
    def _tool_template(self) -> ChatTemplate:
        return _compile(self.for_tools or self.default)

    @functools.cached_property
    def _traits(self) -> TemplateTraits:
        return find_traits(self._template, self._named_tokens)

    @functools.cached_property
    def _tool_traits(self) -> TemplateTraits:
        return find_traits(self._tool_template, self._named_tokens)


def _compile(source: str | None) -> ChatTemplate:
    if source is None:
        raise NoChatTemplateError(
            "this model has no chat template; send the prompt as text or token ids"
        )
    return ChatTemplate(source)
