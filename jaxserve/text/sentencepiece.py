"""Makes SentencePiece's tokenizers from a vocabulary with scores.

SentencePiece's BPE has no list of merges: it always joins the two neighbours whose joined token has
the best score, the leftmost of equals (`bpe_model.cc`). The `tokenizers` library wants merges in
an order, which is the tokens by score, each with all its splits.
"""

import math
from collections.abc import Collection

import tokenizers
from tokenizers import Regex, decoders, models, normalizers
from tokenizers.normalizers import Normalizer

from jaxserve.errors import CheckpointError
from jaxserve.text.backends import naming_library_errors
from jaxserve.text.token_bytes import SPACE_MARK
from jaxserve.text.vocabulary import TokenType, Vocabulary, add_typed_tokens

NUM_BYTES = 256
# Joined from parts; control, unknown and byte tokens never are, user-defined ones are matched.
_JOINED_TYPES = (TokenType.NORMAL, TokenType.UNUSED)


def build_sentencepiece_bpe(
    vocabulary: Vocabulary,
    *,
    adds_space_prefix: bool,
    removes_extra_spaces: bool = False,
    swallows_spaces: Collection[str] = (),
) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a vocabulary that was trained as BPE.

    Args:
      adds_space_prefix: a space is put before a text, and before a text after a special token.
      removes_extra_spaces: runs of spaces become one, those at the ends go.
      swallows_spaces: special tokens that take the white space after them.

    Raises:
      CheckpointError: scores or types are missing, or there is text that has no tokens.
    """
    unknown = next(vocabulary.of_type(TokenType.UNKNOWN), None)
    num_byte_tokens = _check_tokens(vocabulary, unknown)
    with naming_library_errors("the vocabulary is no usable SentencePiece vocabulary"):
        model = models.BPE(
            vocab=vocabulary.ids(),
            merges=derive_merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=num_byte_tokens > 0,
        )
    backend = tokenizers.Tokenizer(model)
    steps: list[Normalizer] = []
    if removes_extra_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" +"), " ")]
    if adds_space_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
    strips = [decoders.Strip(" ", 1, 0)] if adds_space_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    add_typed_tokens(backend, vocabulary, swallows_spaces=swallows_spaces)
    return backend


def _check_tokens(vocabulary: Vocabulary, unknown: str | None) -> int:
    """Returns the number of byte tokens: all or none."""
    for name, values in (("types", vocabulary.types), ("scores", vocabulary.scores)):
        if not values:
            raise CheckpointError(
                f"the SentencePiece vocabulary has no token {name}, without which no text can be "
                "encoded; the file has no whole tokenizer"
            )
    if any(not math.isfinite(score) for score in vocabulary.scores):
        raise CheckpointError("a token's score is not a finite number; the file is damaged")
    found = set(vocabulary.of_type(TokenType.BYTE))
    wanted = {f"<0x{byte:02X}>" for byte in range(NUM_BYTES)}
    if found and found != wanted:
        raise CheckpointError(
            f"the SentencePiece vocabulary has {len(found & wanted)} of the {NUM_BYTES} byte "
            "tokens <0x00> to <0xFF>; the file is damaged"
        )
    if not found and unknown is None:
        raise CheckpointError(
            "the SentencePiece vocabulary has neither byte tokens nor an unknown token, so that "
            "some text would vanish; the file is damaged"
        )
    return len(found)


def derive_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the merges that join as SentencePiece does: better scores first.

    Where two splits of one token compete for the piece between them, the left one must win:
    in ab·a·ba both give "aba", so (ab, a) comes before (a, ba).
    """
    joined = set(vocabulary.of_type(*_JOINED_TYPES))
    by_score = sorted(
        (-score, id, token)
        for id, (token, score) in enumerate(zip(vocabulary.tokens, vocabulary.scores, strict=True))
        if token in joined and len(token) > 1
    )
    merges = []
    for _, _, token in by_score:
        splits = [
            size
            for size in range(1, len(token))
            if token[:size] in joined and token[size:] in joined
        ]
        if len(splits) > 1:
            splits.sort(key=lambda size: _loses_to_the_left(token, size))
        merges += [(token[:size], token[size:]) for size in splits]
    return merges


def _loses_to_the_left(token: str, size: int) -> bool:
    """Whether the first part also ends the token, so that another split can hold it as its end."""
    return token.endswith(token[:size]) and not token.startswith(token[size:])
