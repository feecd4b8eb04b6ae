"""Tiny vocabularies for the tests of text/."""

import collections
import itertools

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.text.byte_bpe import build_byte_bpe
from jaxserve.text.pre_kinds import PRE_KINDS
from jaxserve.text.sentencepiece import build_sentencepiece_bpe
from jaxserve.text.token_bytes import byte_alphabet
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenType, Vocabulary, build_vocabulary

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ", "< |"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRAINING_TEXT = (
    "the theme of the thesis is that these themes then assist us all: user assistant aba aba abab "
    "hello hello world wore the user the assistant answers the user and the user asks anew"
)
BOS, EOS, IM_START, IM_END = range(4)


def byte_backend(pre: str = "gpt-2") -> tokenizers.Tokenizer:
    """Four specials, the 256 bytes, a few merges."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIALS, *byte_alphabet(), *merged]
    types = [TokenType.CONTROL] * len(SPECIALS) + [TokenType.NORMAL] * (len(tokens) - len(SPECIALS))
    return build_byte_bpe(build_vocabulary(tokens, types=types), MERGES, pre=PRE_KINDS[pre])


def byte_tokenizer(
    *, add_bos: bool | None = False, chat_template: str | None = CHAT_TEMPLATE
) -> Tokenizer:
    return Tokenizer.from_backend(
        byte_backend(),
        bos_id=BOS,
        eos_ids=[EOS, IM_END],
        add_bos=add_bos,
        chat_template=chat_template,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


def trained_vocabulary(*, num_merges: int = 60) -> Vocabulary:
    """A SentencePiece BPE vocabulary as training makes it: the n-th merge has the score -n.

    The ids are in alphabetical order, so that nothing can take them for the scores.
    """
    words = [["▁", *word] for word in TRAINING_TEXT.split()] + [["▁"] * 9, list("ababababa")]
    merged: list[str] = []
    while len(merged) < num_merges:
        pairs = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        pair = max(pairs, key=lambda pair: (pairs[pair], pair))
        if "".join(pair) not in merged:
            merged.append("".join(pair))
        words = [join_pair(word, pair) for word in words]
    letters = sorted(set("".join(merged)))
    rows = [
        ("<unk>", 0.0, TokenType.UNKNOWN),
        ("<s>", 0.0, TokenType.CONTROL),
        ("</s>", 0.0, TokenType.CONTROL),
        *((f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)),
        *sorted(
            (token, -float(n), TokenType.NORMAL) for n, token in enumerate([*merged, *letters])
        ),
        ("\n\n", 0.0, TokenType.USER_DEFINED),
        ("<|im_start|>", 0.0, TokenType.CONTROL),
        ("<|im_end|>", 0.0, TokenType.CONTROL),
    ]
    tokens, scores, types = zip(*rows, strict=True)
    return build_vocabulary(tokens, types=types, scores=scores)


def join_pair(word: list[str], pair: tuple[str, str]) -> list[str]:
    joined: list[str] = []
    for piece in word:
        if joined and (joined[-1], piece) == pair:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def sentencepiece_tokenizer(
    *,
    add_bos: bool | None = True,
    chat_template: str | None = CHAT_TEMPLATE,
    adds_space_prefix: bool = True,
) -> Tokenizer:
    vocabulary = trained_vocabulary()
    return Tokenizer.from_backend(
        build_sentencepiece_bpe(vocabulary, adds_space_prefix=adds_space_prefix),
        bos_id=1,
        eos_ids=[2, vocabulary.ids()["<|im_end|>"]],
        add_bos=add_bos,
        chat_template=chat_template,
        named_tokens={"bos_token": "<s>", "eos_token": "</s>"},
    )


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """BPE with "▁" for spaces and byte tokens, spelled as Llama 2's tokenizer.json is."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(0x21, 0x7F)]
    vocab = {token: id for id, token in enumerate([*words, "▁", *letters, "▁a", "▁b"])}
    model = models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return backend


def word_backend(*words: str) -> tokenizers.Tokenizer:
    """Whole words without a decoder, as tiny test models have."""
    model = models.WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend
