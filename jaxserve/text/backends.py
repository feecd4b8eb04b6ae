"""Makes the `tokenizers` library's object: from a tokenizer.json, or from a bare BPE vocabulary."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxserve.errors import CheckpointError

logger = logging.getLogger(__name__)

# The token types of a GGUF vocabulary (llama.cpp, `enum llama_token_type`).
CONTROL_TYPE, USER_DEFINED_TYPE = 3, 4

# The patterns vocabularies were trained with, as their tokenizer.json files give them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORD}|\p{{N}}|{_REST}"


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class PreKind:
    """How a vocabulary splits text before its merges; `patterns` are applied one after another.

    Attributes:
      whole_words: a split that is a token is taken as it is, whatever the merges say.
      composes: text is brought to Unicode's composed form first.
      adds_bos: what holds where the file does not say.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    composes: bool = False
    adds_bos: bool = False

    def build(self) -> PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in self.patterns]
        spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, spell])


# By `tokenizer.ggml.pre`; the same choices as llama.cpp's `llama_vocab::impl::load`.
PRE_KINDS = {
    "default": PreKind(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreKind(patterns=(_GPT2,)),
    "smollm": PreKind(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": PreKind(patterns=(_LLAMA3,), whole_words=True, adds_bos=True),
    "qwen2": PreKind(patterns=(_QWEN2,), composes=True),
}


def find_pre_kind(name: str | None) -> PreKind:
    """Returns the kind of a `tokenizer.ggml.pre`; None, as in old files, is "default".

    Raises:
      CheckpointError: the kind is not known here.
    """
    if name is None:
        logger.warning("the file names no pre-tokenizer; taking tokenizer.ggml.pre=default")
        return PRE_KINDS["default"]
    if name not in PRE_KINDS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported; supported are "
            f"{', '.join(sorted(PRE_KINDS))}; use the model's Hugging Face folder instead"
        )
    return PRE_KINDS[name]


def build_byte_bpe(
    *, tokens: Sequence[str], token_types: Sequence[int], merges: Sequence[str], pre: PreKind
) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer (GPT-2's kind).

    Args:
      tokens: by id; ordinary ones in GPT-2's byte alphabet.
      token_types: by id; control tokens become special, user-defined ones are matched whole.
      merges: "left right", best first.

    Raises:
      CheckpointError: the lists do not fit together.
    """
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise CheckpointError(
            f"the vocabulary holds the token {twice!r} twice; the file is damaged"
        )
    if len(token_types) not in (0, len(tokens)):
        raise CheckpointError(
            f"the vocabulary has {len(tokens)} tokens but {len(token_types)} token types; "
            "the file is damaged"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:  # the library panics on some of these
        if not (left in vocab and right in vocab and left + right in vocab):
            raise CheckpointError(
                f"the merge {left!r} {right!r} does not fit the vocabulary; the file is damaged"
            )
    with naming_library_errors("the vocabulary's merges do not fit its tokens"):
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    typed = list(zip(tokens, token_types, strict=False))
    control = [token for token, kind in typed if kind == CONTROL_TYPE and token]
    whole = [token for token, kind in typed if kind == USER_DEFINED_TYPE and token]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in whole])
    return backend


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`.

    Raises:
      CheckpointError: the file is missing or is not a tokenizer.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read the tokenizer {path}: {error}; a model folder needs its tokenizer.json"
        ) from error
    with naming_library_errors(f"{path} is not a tokenizer that the tokenizers library knows"):
        return tokenizers.Tokenizer.from_str(text)


class naming_library_errors:  # noqa: N801  (used as a function)
    """Turns the bare `Exception` that the tokenizers library raises into a `CheckpointError`.

    It raises no class of its own, and an `except Exception` would take in everything else.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind in (Exception, ValueError, TypeError):
            raise CheckpointError(f"{self._what}: {error}") from error
