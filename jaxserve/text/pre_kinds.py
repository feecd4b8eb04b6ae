
"""How byte-level BPE vocabularies split text before their merges, by GGUF's name for it."""

import dataclasses
import logging

from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from jaxserve.errors import CheckpointError

logger = logging.getLogger(__name__)


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


# The patterns vocabularies were trained with, as their tokenizer.json files give them.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_CASED_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_CASED_REST}"
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώ"
    "ᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)

_GPT2_KIND = PreKind(patterns=(_GPT2,))
_DIGIT_KIND = PreKind(patterns=(r"\p{N}", _GPT2))
_LLAMA3_KIND = PreKind(patterns=(_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN2_KIND = PreKind(patterns=(_QWEN2,), composes=True)

# By `tokenizer.ggml.pre`; the same choices as llama.cpp's `llama_vocab::impl::load`.
PRE_KINDS = {
    "default": PreKind(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_KIND,
    "phi-2": _GPT2_KIND,
    "mpt": _GPT2_KIND,
    "olmo": _GPT2_KIND,
    "smollm": _DIGIT_KIND,
    "starcoder": _DIGIT_KIND,
    "refact": _DIGIT_KIND,
    "command-r": _DIGIT_KIND,
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "dbrx": PreKind(patterns=(_LLAMA3,)),
    "smaug-bpe": PreKind(patterns=(_LLAMA3,)),
    "qwen2": _QWEN2_KIND,
    "deepseek-r1-qwen": _QWEN2_KIND,
    "stablelm2": PreKind(patterns=(_QWEN2,)),
    "qwen35": PreKind(patterns=(_QWEN35,), composes=True),
    "tekken": PreKind(patterns=(_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreKind(patterns=(_GPT4O,)),
    "llama4": PreKind(patterns=(_GPT4O,)),
    "falcon": PreKind(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreKind(
        patterns=(
            "[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreKind(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": PreKind(patterns=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
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
