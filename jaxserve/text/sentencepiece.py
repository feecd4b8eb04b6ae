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
    _check_scores_differ(vocabulary)
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


def _check_scores_differ(vocabulary: Vocabulary) -> None:
    """Refuse the placeholder scores that some converters write.

    Llama 2's runs of spaces share one score, and come out right all the same (`judges/vocab`).
    """
    joined = set(vocabulary.of_type(*_JOINED_TYPES))
    pairs = zip(vocabulary.tokens, vocabulary.scores, strict=True)
    scores = [score for token, score in pairs if len(token) > 1 and token in joined]
    num_equal = len(scores) - len(set(scores))
    if num_equal > len(scores) // 2:
        raise CheckpointError(
            f"{num_equal} of {len(scores)} tokens share their score with another, so that nothing "
            "says which to join first; make the file again from the model's tokenizer.model"
        )


def derive_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Returns the merges that join as SentencePiece does: better scores first.

    Where two splits of one token compete for the piece between them, the left one must win:
    in ab·a·ba both give "aba", so (ab, a) comes before (a, ba).
    """
    joined = set(vocabulary.of_type(*_JOINED_TYPES))
    tokens, scores = vocabulary.tokens, vocabulary.scores
    by_score = sorted(range(len(tokens)), key=lambda id: -scores[id])
    merges = []
    for token in (tokens[id] for id in by_score if tokens[id] in joined):
        pairs = [(token[:size], token[size:]) for size in range(1, len(token))]
        fitting = [pair for pair in pairs if pair[0] in joined and pair[1] in joined]
        if len(fitting) > 1 and token[0] in token[1:]:
            fitting.sort(key=lambda pair: _loses_to_the_left(*pair))
        merges += fitting
    return merges


def _loses_to_the_left(left: str, right: str) -> bool:
    """Whether another split of this token can hold `left` as its end, and must come first."""
    token = left + right
    return token.endswith(left) and not token.startswith(right)
