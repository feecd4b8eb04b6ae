"""The prompt in front of a completion's text, and where its tokens stand in it."""

import dataclasses
import itertools
from collections.abc import Sequence

from jaxserve.engine import Tokenizer
from jaxserve.plan import TokenLogprobs
from jaxserve.server.openai.logprobs import Place
from jaxserve.text.detokenizer import Detokenizer


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Echo:
    """A prompt as text.

    Attributes:
      places: its tokens; empty where their log-probabilities are not asked for.
    """

    text: str
    places: tuple[Place, ...] = ()


def build_echo(
    prompt: str | tuple[int, ...],
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool,
    entries: Sequence[TokenLogprobs] | None,
) -> Echo:
    """Returns a prompt as it stands in the reply: a text as it was sent, ids as their text.

    Args:
      entries: log-probabilities from the second token on; None where they are not asked for.
    """
    if isinstance(prompt, str):
        text = prompt
        starts = [start for start, _ in tokenizer.encode_with_offsets(prompt)[1]] if entries else []
    else:
        text, starts = _spell(prompt_ids, tokenizer, skip_special_tokens)
    if entries is None:
        return Echo(text=text)
    starts = starts or [0] * len(prompt_ids)
    return Echo(
        text=text,
        places=tuple(
            Place(token_id=token_id, entry=entry, offset=start)
            for token_id, entry, start in zip(prompt_ids, (None, *entries), starts, strict=True)
        ),
    )


class Offsets:
    """Where each next token begins in a text that grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        prompt: Sequence[int],
        first: int,
    ) -> None:
        """Args:
        prompt: what the text continues.
        first: characters in front of it.
        """
        self._decoder = Detokenizer(tokenizer, skip_special_tokens, prompt=prompt)
        self._next = first

    def take(self, token_id: int) -> int:
        """Returns the characters in front of the next token."""
        offset = self._next
        self._next += len(self._decoder.push((token_id,)))
        return offset


def _spell(
    token_ids: Sequence[int], tokenizer: Tokenizer, skip_special_tokens: bool
) -> tuple[str, list[int]]:
    decoder = Detokenizer(tokenizer, skip_special_tokens, prompt=())
    pieces = [decoder.push((token_id,)) for token_id in token_ids]
    starts = list(itertools.accumulate(map(len, pieces), initial=0))[:-1]
    return "".join(pieces) + decoder.flush(), starts
