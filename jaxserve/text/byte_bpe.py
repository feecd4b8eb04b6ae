"""Makes byte-pair tokenizers from a vocabulary and its merges, as GGUF files list them."""

from collections.abc import Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.text.backends import naming_library_errors
from jaxserve.text.pre_kinds import PreKind
from jaxserve.text.token_bytes import SPACE_MARK
from jaxserve.text.vocabulary import Vocabulary, add_typed_tokens


def build_byte_bpe(
    vocabulary: Vocabulary, merges: Sequence[str], *, pre: PreKind
) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer (GPT-2's kind): tokens are in GPT-2's byte alphabet.

    Args:
      merges: "left right", best first.

    Raises:
      CheckpointError: the merges do not fit the vocabulary.
    """
    vocab = vocabulary.ids()
    pairs = split_merges(vocab, merges)
    with naming_library_errors("the vocabulary's merges do not fit its tokens"):
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    add_typed_tokens(backend, vocabulary)
    return backend


def build_marked_bpe(vocabulary: Vocabulary, merges: Sequence[str]) -> tokenizers.Tokenizer:
    """Returns a BPE tokenizer whose tokens are text with "▁" for spaces, and bytes "<0x0A>".

    Gemma 4's kind: no words are split off, only runs of newlines.

    Args:
      merges: "left right", best first.

    Raises:
      CheckpointError: the merges do not fit the vocabulary.
    """
    vocab = vocabulary.ids()
    pairs = split_merges(vocab, merges)
    with naming_library_errors("the vocabulary's merges do not fit its tokens"):
        model = models.BPE(vocab=vocab, merges=pairs, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    add_typed_tokens(backend, vocabulary)
    return backend


def split_merges(vocab: dict[str, int], merges: Sequence[str]) -> list[tuple[str, str]]:
    """Returns "left right" as pairs; the library panics on some that do not fit.

    Raises:
      CheckpointError: a part, or what they make together, is no token.
    """
    pairs = []
    for merge in merges:
        split = max(merge.find(" ", 1), 0)  # a token may begin with the space itself
        left, right = merge[:split], merge[split + 1 :]
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(
                f"the merge {merge!r} does not fit the vocabulary; the file is damaged"
            )
        pairs.append((left, right))
    return pairs
