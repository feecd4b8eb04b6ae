"""Log-probabilities in the forms of OpenAI's two endpoints, and in vLLM's for prompts."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from jaxserve.engine import Tokenizer
from jaxserve.plan import TokenLogprobs

Legacy = dict[str, list[object]]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """A token in a choice's text.

    Attributes:
      entry: None for a prompt's first token, which nothing predicts.
      offset: characters of the text before it.
    """

    token_id: int
    entry: TokenLogprobs | None
    offset: int


class TokenNames:
    """Spells tokens in replies."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """Args:
        as_ids: as "token_id:N", vLLM's unmistakable form.
        """
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def key(self, token_id: int) -> str:
        """Returns a name for the completions endpoint, which has no other place for bytes that are
        no whole characters: OpenAI's own spelling of those is `bytes:\\xe2\\x82`."""
        if self._as_ids:
            return f"token_id:{token_id}"
        spelled = self.spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def text(self, token_id: int) -> str:
        """Returns a name for the chat endpoint, where the bytes stand beside it."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.spell(token_id).decode("utf-8", "replace")

    def spell(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


def build_legacy(places: Iterable[Place], names: TokenNames, *, num_top: int) -> Legacy:
    """Returns the completions endpoint's parallel lists."""
    legacy: Legacy = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for place in places:
        entry = place.entry
        legacy["tokens"].append(names.key(place.token_id))
        legacy["token_logprobs"].append(None if entry is None else entry.logprob)
        legacy["top_logprobs"].append(
            None if entry is None else _build_top(entry, names, num_top=num_top)
        )
        legacy["text_offset"].append(place.offset)
    return legacy


def build_content(
    entries: Iterable[TokenLogprobs], names: TokenNames, *, num_top: int
) -> list[dict[str, object]]:
    """Returns the chat endpoint's list of tokens."""
    return [
        {
            **_build_token(entry.token_id, entry.logprob, names),
            "top_logprobs": [
                _build_token(token_id, logprob, names)
                for token_id, logprob in _alternatives(entry, num_top)
            ],
        }
        for entry in entries
    ]


def build_prompt_logprobs(
    prompt_ids: Sequence[int], entries: Iterable[TokenLogprobs], names: TokenNames, *, num_top: int
) -> list[dict[str, object] | None]:
    """Returns vLLM's list: nothing for the first token, then each position's tokens by id."""
    found: list[dict[str, object] | None] = [None] if prompt_ids else []
    for entry in entries:
        ranked = [
            (token_id, logprob, rank)
            for rank, (token_id, logprob) in enumerate(_alternatives(entry, num_top), start=1)
        ]
        own = (entry.token_id, entry.logprob, entry.rank)
        found.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": names.text(token_id),
                }
                for token_id, logprob, rank in (*ranked, own)
            }
        )
    return found


def _build_top(entry: TokenLogprobs, names: TokenNames, *, num_top: int) -> dict[str, float]:
    """Returns the most likely tokens and the token itself; of two with one name the likelier."""
    top: dict[str, float] = {}
    for token_id, logprob in _alternatives(entry, num_top):
        top.setdefault(names.key(token_id), logprob)
    top.setdefault(names.key(entry.token_id), entry.logprob)
    return top


def _build_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, object]:
    return {
        "token": names.text(token_id),
        "logprob": logprob,
        "bytes": list(names.spell(token_id)),
    }


def _alternatives(entry: TokenLogprobs, num_top: int) -> Iterator[tuple[int, float]]:
    """Yields the most likely tokens, most likely first; more may have been asked for elsewhere."""
    return zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
