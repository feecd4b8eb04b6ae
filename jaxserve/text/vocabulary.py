"""A vocabulary as model files list it: tokens, their types and scores by id."""

import dataclasses
import enum
from collections.abc import Collection, Iterator, Sequence

import tokenizers
from tokenizers import AddedToken

from jaxserve.errors import CheckpointError


class TokenType(enum.IntEnum):
    """The types of GGUF (llama.cpp, `enum llama_token_type`) and of SentencePiece, which agree."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_TYPES = frozenset({TokenType.CONTROL, TokenType.UNKNOWN})


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Vocabulary:
    """Lists by id. Checked: each token once, and the lists fit together.

    Attributes:
      types: empty if the file has none; then all tokens are ordinary ones.
      scores: empty but for SentencePiece vocabularies; a better token has a higher score.
    """

    tokens: Sequence[str]
    types: Sequence[int] = ()
    scores: Sequence[float] = ()

    def of_type(self, *wanted: TokenType) -> Iterator[str]:
        """Yields the tokens of these types, in the order of their ids."""
        types = self.types or [TokenType.NORMAL] * len(self.tokens)
        return (token for token, kind in zip(self.tokens, types, strict=True) if kind in wanted)

    def ids(self) -> dict[str, int]:
        return {token: id for id, token in enumerate(self.tokens)}


def build_vocabulary(
    tokens: Sequence[str], *, types: Sequence[int] = (), scores: Sequence[float] = ()
) -> Vocabulary:
    """Returns the lists as a vocabulary; an empty token gets llama.cpp's name, "[EMPTY_7]".

    Raises:
      CheckpointError: a token is there twice, or a list has another length.
    """
    named = [token or f"[EMPTY_{id}]" for id, token in enumerate(tokens)]
    first: dict[str, int] = {}
    for id, token in enumerate(named):
        if first.setdefault(token, id) != id:
            raise CheckpointError(
                f"the vocabulary holds the token {token!r} twice, as {first[token]} and {id}; "
                "the file is damaged"
            )
    for name, values in (("token types", types), ("scores", scores)):
        if len(values) not in (0, len(named)):
            raise CheckpointError(
                f"the vocabulary has {len(named)} tokens but {len(values)} {name}; "
                "the file is damaged"
            )
    return Vocabulary(tokens=named, types=types, scores=scores)


def add_typed_tokens(
    backend: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    *,
    swallows_spaces: Collection[str] = (),
) -> None:
    """Make control and unknown tokens special; these and user-defined ones are matched whole.

    Args:
      swallows_spaces: tokens that take the white space after them.
    """
    special = [
        AddedToken(token, special=True, normalized=False, rstrip=token in swallows_spaces)
        for token in vocabulary.of_type(*SPECIAL_TYPES)
    ]
    whole = [
        AddedToken(token, normalized=False, rstrip=token in swallows_spaces)
        for token in vocabulary.of_type(TokenType.USER_DEFINED)
    ]
    backend.add_special_tokens(special)
    backend.add_tokens(whole)
