"""SentencePiece vocabularies: joins by score, byte tokens, spaces, and what is refused."""

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.text.byte_bpe import build_marked_bpe
from jaxserve.text.hf_folder import load_tokenizer
from jaxserve.text.sentencepiece import build_sentencepiece_bpe, derive_merges
from jaxserve.text.sentencepiece_file import read_sentencepiece_model
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenType, Vocabulary, build_vocabulary
from tests.text.vocabularies import sentencepiece_tokenizer, trained_vocabulary

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def join_by_score(text: str, vocabulary: Vocabulary) -> list[str]:
    """SentencePiece's rule, word for word: the best joined neighbours, the leftmost of equals."""
    ordinary = set(vocabulary.of_type(TokenType.NORMAL))
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[pieces[i] + pieces[i + 1]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in ordinary
        ]
        if not joins:
            break
        _, at = min(joins)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    known = set(vocabulary.tokens)
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in known else [BYTE_TOKENS[b] for b in piece.encode()])
    ]


def small(*rows: tuple[str, float], unknown: bool = True) -> Vocabulary:
    """Ordinary tokens with scores, after an unknown token."""
    tokens = [*(["<unk>"] if unknown else []), *(token for token, _ in rows)]
    types = [*([TokenType.UNKNOWN] if unknown else []), *(TokenType.NORMAL for _ in rows)]
    scores = [*([0.0] if unknown else []), *(score for _, score in rows)]
    return build_vocabulary(tokens, types=types, scores=scores)


def spell(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [str(tokenizer._backend.id_to_token(id)) for id in ids]


def test_joins_are_those_of_the_rule_on_random_texts() -> None:
    vocabulary = trained_vocabulary()
    tokenizer = sentencepiece_tokenizer(adds_space_prefix=False)
    rng = random.Random(58)
    parts = [
        "the",
        "them",
        " the",
        "us",
        "user",
        "aba",
        "ab",
        "a",
        " ",
        "  ",
        "hello",
        "é",
        "🌶",
        "s",
    ]
    for _ in range(2000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        assert spell(tokenizer, text) == join_by_score(text, vocabulary), text


def test_of_two_splits_that_share_a_piece_the_left_one_wins() -> None:
    # ab·a·ba: both neighbours give "aba"; and ab·aba·ba, where the shared piece is the longer one
    vocabulary = small(*[(c, -90.0) for c in "ab"], ("ab", -1.0), ("ba", -2.0), ("aba", -3.0))
    merges = [merge for merge in derive_merges(vocabulary) if "".join(merge) == "aba"]
    assert merges == [("ab", "a"), ("a", "ba")]
    vocabulary = small(
        *[(c, -90.0) for c in "ab"], ("ab", -1.0), ("ba", -2.0), ("aba", -3.0), ("ababa", -4.0)
    )
    merges = [merge for merge in derive_merges(vocabulary) if "".join(merge) == "ababa"]
    assert merges == [("ab", "aba"), ("aba", "ba")]


@pytest.mark.parametrize(
    ("text", "prefixed", "bare"),
    [
        ("", [], []),
        ("the", ["▁the"], ["t", "he"]),
        (" the", ["▁", "▁the"], ["▁the"]),
        ("é\n", ["▁", "<0xC3>", "<0xA9>", "<0x0A>"], ["<0xC3>", "<0xA9>", "<0x0A>"]),
        ("the\n\nthe", ["▁the", "\n\n", "▁the"], ["t", "he", "\n\n", "t", "he"]),
        (
            "</s>the</s> the",
            ["</s>", "▁the", "</s>", "▁", "▁the"],
            ["</s>", "t", "he", "</s>", "▁the"],
        ),
    ],
)
def test_a_space_goes_before_a_text_and_after_a_special_token_where_the_file_says_so(
    text: str, prefixed: list[str], bare: list[str]
) -> None:
    for tokens, adds_space_prefix in ((prefixed, True), (bare, False)):
        tokenizer = sentencepiece_tokenizer(adds_space_prefix=adds_space_prefix)
        assert spell(tokenizer, text) == tokens
        ids = tokenizer.encode(text, add_special_tokens=False)
        if "</s>" not in text and text != "the\n\nthe":
            assert tokenizer.decode(ids) == text


def test_extra_spaces_go_where_the_file_says_so() -> None:
    backend = build_sentencepiece_bpe(
        trained_vocabulary(), adds_space_prefix=True, removes_extra_spaces=True
    )
    tokenizer = Tokenizer.from_backend(backend)
    assert tokenizer.encode("  the   user ") == tokenizer.encode("the user")
    assert spell(tokenizer, "  the") == ["▁the"]


def test_a_token_that_swallows_spaces_takes_those_after_it() -> None:
    backend = build_sentencepiece_bpe(
        trained_vocabulary(), adds_space_prefix=True, swallows_spaces=["<|im_end|>"]
    )
    tokenizer = Tokenizer.from_backend(backend)
    assert spell(tokenizer, "<|im_end|>\n the") == ["<|im_end|>", "▁the"]
    assert spell(tokenizer, "</s>\nthe")[:3] == ["</s>", "▁", "<0x0A>"]


def test_without_byte_tokens_strange_text_is_one_unknown_token() -> None:
    vocabulary = small(("▁", -1.0), ("a", -2.0))
    tokenizer = Tokenizer.from_backend(build_sentencepiece_bpe(vocabulary, adds_space_prefix=True))
    assert spell(tokenizer, "aéüa") == ["▁", "a", "<unk>", "a"]


def test_bytes_and_marks_stand_for_themselves() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = trained_vocabulary().ids()
    for token, wanted in (
        ("<0xE2>", b"\xe2"),
        ("▁the", b" the"),
        ("</s>", b"</s>"),
        ("\n\n", b"\n\n"),
    ):
        assert tokenizer.token_bytes(ids[token]) == wanted
    assert {tokenizer.token_bytes(ids[token]) for token in BYTE_TOKENS} == {
        bytes([byte]) for byte in range(256)
    }
    assert tokenizer.special_ids == {0, 1, 2, ids["<|im_start|>"], ids["<|im_end|>"]}


def test_a_vocabulary_with_marks_and_merges_needs_no_scores() -> None:
    tokens = [*BYTE_TOKENS, "▁", "a", "\n", "\n\n", "▁a", "<bos>"]
    types = [*[TokenType.BYTE] * 256, *[TokenType.NORMAL] * 5, TokenType.CONTROL]
    vocabulary = build_vocabulary(tokens, types=types)
    tokenizer = Tokenizer.from_backend(build_marked_bpe(vocabulary, ["▁ a", "\n \n"]))
    assert spell(tokenizer, "a a\n\né<bos>") == ["a", "▁a", "\n\n", "<0xC3>", "<0xA9>", "<bos>"]
    assert tokenizer.decode(tokenizer.encode(" a a\n\né")) == " a a\n\né"


def edited(**lists: Sequence[object]) -> Vocabulary:
    whole = trained_vocabulary()
    fields = {"tokens": whole.tokens, "types": whole.types, "scores": whole.scores} | lists
    return Vocabulary(**fields)  # type: ignore[arg-type]  # on purpose damaged


def test_a_vocabulary_that_cannot_encode_all_text_is_refused() -> None:
    whole = trained_vocabulary()
    one_less = ["<0xAA>x" if token == "<0xAA>" else token for token in whole.tokens]
    cases = [
        (edited(scores=()), "has no token scores"),
        (edited(types=()), "has no token types"),
        (edited(scores=[float("nan")] * len(whole.tokens)), "not a finite number"),
        (edited(scores=[-1000.0] * len(whole.tokens)), "59 of 60 tokens share their score"),
        (edited(tokens=one_less), "255 of the 256 byte tokens"),
        (small(("a", 0.0), unknown=False), "neither byte tokens nor an unknown token"),
    ]
    for vocabulary, message in cases:
        with pytest.raises(CheckpointError, match=message):
            build_sentencepiece_bpe(vocabulary, adds_space_prefix=True)


def field(number: int, value: int | float | bytes) -> bytes:
    """One protobuf field; fields above 15 are written with a two-byte tag."""
    kind = {int: 0, float: 5, bytes: 2}[type(value)]
    tag = varint(number << 3 | kind)
    match value:
        case bytes():
            return tag + varint(len(value)) + value
        case float():
            return tag + struct.pack("<f", value)
    return tag + varint(value & (1 << 64) - 1)


def varint(value: int) -> bytes:
    groups = []
    while True:
        value, low = value >> 7, value & 0x7F
        groups.append(low | (0x80 if value else 0))
        if not value:
            return bytes(groups)


def model_file(
    vocabulary: Vocabulary, *, trainer: bytes = field(3, 2), normalizer: bytes = field(4, 0)
) -> bytes:
    rows = zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    pieces = [
        field(1, field(1, token.encode()) + field(2, score) + field(3, int(kind)))
        for token, score, kind in rows
    ]
    return field(2, trainer) + field(3, normalizer) + field(4, b"x") + b"".join(pieces)


def test_a_folder_with_only_a_tokenizer_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model_file(trained_vocabulary()))
    tokenizer = load_tokenizer(tmp_path)
    twin = sentencepiece_tokenizer()
    for text in ("the user  é\n\n", "</s>the", ""):
        assert tokenizer.encode(text) == twin.encode(text)
    assert (tokenizer.bos_id, set(tokenizer.eos_ids), tokenizer.add_bos) == (1, {2}, True)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    (tmp_path / "added_tokens.json").write_text('{"<new>": 999}')
    with pytest.raises(CheckpointError, match="'<new>' the id 999"):
        load_tokenizer(tmp_path)
    size = len(trained_vocabulary().tokens)
    (tmp_path / "added_tokens.json").write_text(f'{{"<new>": {size}}}')
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<new>"]}')
    tokenizer = load_tokenizer(tmp_path)
    assert not tokenizer.add_bos
    assert tokenizer.encode("<new>") == [size]
    assert size in tokenizer.special_ids


def test_a_model_file_of_another_kind_is_refused_with_the_way_out(tmp_path: Path) -> None:
    vocabulary = trained_vocabulary()
    path = tmp_path / "tokenizer.model"
    cases = [
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),
        (b"", "it holds no tokens"),
        (model_file(vocabulary, trainer=field(3, 1)), "of the kind 'unigram'"),
        (model_file(vocabulary, normalizer=field(2, b"map")), "changes its text"),
        (model_file(vocabulary, normalizer=field(5, 0)), "changes its text"),
        (model_file(vocabulary, trainer=field(3, 2) + field(24, 1)), "changes its text"),
    ]
    for data, message in cases:
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{message}.*; make its tokenizer\.json once"):
            load_tokenizer(tmp_path)
    path.write_bytes(model_file(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    with pytest.raises(CheckpointError, match=r"legacy=false.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_model_file_that_ends_in_a_token_is_refused(tmp_path: Path) -> None:
    whole = model_file(trained_vocabulary(), trainer=field(3, 2) + field(41, -1))
    path = tmp_path / "tokenizer.model"
    path.write_bytes(whole)
    assert read_sentencepiece_model(path).bos_id is None
    for missing in range(1, 10):  # the last token's field is longer than that
        path.write_bytes(whole[:-missing])
        with pytest.raises(CheckpointError, match=r"not a SentencePiece model: it ends in the mid"):
            read_sentencepiece_model(path)
