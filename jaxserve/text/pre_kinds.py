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
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
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
    "qwen35": PreKind(patterns=(_QWEN35,)),
    "tekken": PreKind(patterns=(_TEKKEN,), whole_words=True, adds_bos=True),
    "gpt-4o": PreKind(patterns=(_GPT4O,)),
    "llama4": PreKind(patterns=(_GPT4O,)),
    "falcon": PreKind(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreKind(
        patterns=(
            "[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreKind(
        patterns=("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": PreKind(
        patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK3)
    ),
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
