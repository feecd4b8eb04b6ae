"""Fields of OpenAI bodies that do nothing here, and those that are refused by name."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

from jaxserve.errors import InvalidRequestError, UnsupportedError

# Accepted in any form, since they ask for nothing that changes an output: labels of the caller,
# hints for caches, and billing.
HARMLESS: Final = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Not supported yet, by name, with the values that ask for nothing and so are accepted. OpenAI's
# own first, then what vLLM adds.
_REFUSED_ANYWHERE: Final[dict[str, tuple[object, ...]]] = {
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "length_penalty": (1,),
    "logits_processors": (),
    "request_id": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
REFUSED_IN_COMPLETIONS: Final[Mapping[str, tuple[object, ...]]] = _REFUSED_ANYWHERE | {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "suffix": ("",),
}
REFUSED_IN_CHAT: Final[Mapping[str, tuple[object, ...]]] = _REFUSED_ANYWHERE | {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
REFUSED_IN_MESSAGES: Final[Mapping[str, tuple[object, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


def keep_known(
    values: Mapping[str, object],
    *,
    supported: Iterable[str],
    refused: Mapping[str, tuple[object, ...]],
    harmless: frozenset[str] = frozenset(),
    prefix: str = "",
) -> dict[str, object]:
    """Returns the supported fields that are set; null is unset.

    Args:
      refused: names of what this version does not support, each with its neutral values.
      prefix: path of this object in the body, for messages.

    Raises:
      UnsupportedError: a field that is not supported asks for something.
      InvalidRequestError: a field that nobody knows: it may be a slip of the pen.
    """
    kept: dict[str, object] = {}
    names = frozenset(supported)
    for name, value in values.items():
        path = f"{prefix}{show_name(name)}"
        if name in names:
            if value is not None:
                kept[name] = value
        elif name in refused:
            if value is not None and not _is_among(value, refused[name]):
                raise UnsupportedError(
                    f"{path} is not supported by this version; leave it out", field=path
                )
        elif name not in harmless:
            hint = did_you_mean(name, sorted(names | refused.keys() | harmless))
            raise InvalidRequestError(
                f"{shorten(path)} is not a known field{hint}", field=shorten(path)
            )
    return kept


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean …?", or the advice that is left when nothing is near."""
    near = difflib.get_close_matches(shorten(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else "; leave it out"


def show_name(name: str) -> str:
    """Returns a field's name, one that is empty in quotes: an error must be seen to name it."""
    return name or '""'


def shorten(text: str, limit: int = 64) -> str:
    """Returns the text, cut where a stranger made it long."""
    return text if len(text) <= limit else f"{text[:limit]}…"


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """True is no 1 here, and 1.0 is."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )
