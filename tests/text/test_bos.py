"""BOS: once where the model wants it, whatever the file's format and the prompt's (CASES C58)."""

import itertools
import json
from pathlib import Path

import gguf
import pytest

from jaxserve.checkpoint.gguf_file import open_gguf
from jaxserve.checkpoint.gguf_tokenizer import read_tokenizer
from jaxserve.config import load_config
from jaxserve.engine.limits import tokenize
from jaxserve.engine.served_model import ServedModel
from jaxserve.errors import CheckpointError
from jaxserve.request import ChatMessage, ChatPrompt
from jaxserve.text.hf_folder import load_tokenizer
from jaxserve.text.sentencepiece import build_sentencepiece_bpe
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import TokenType
from tests.text.vocabularies import (
    CHAT_TEMPLATE,
    MERGES,
    SPECIALS,
    byte_backend,
    trained_vocabulary,
)

LIMITS = load_config().limits
TEMPLATES = {"no bos": CHAT_TEMPLATE, "bos": "{{ bos_token }}" + CHAT_TEMPLATE}
# What each vocabulary makes of "hello" alone, and of what follows <|im_start|> in the chat.
BYTE, SENTENCEPIECE = "byte BPE", "SentencePiece"


def write_hf(folder: Path, vocabulary: str, *, add_bos: bool | None, template: str) -> Tokenizer:
    backend = byte_backend()
    if vocabulary == SENTENCEPIECE:
        backend = build_sentencepiece_bpe(trained_vocabulary(), adds_space_prefix=True)
    backend.save(str(folder / "tokenizer.json"))
    flag = {} if add_bos is None else {"add_bos_token": add_bos}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template} | flag
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder)


def write_gguf(folder: Path, vocabulary: str, *, add_bos: bool | None, template: str) -> Tokenizer:
    writer = gguf.GGUFWriter(folder / "vocab.gguf", "llama")
    if vocabulary == BYTE:
        ids = byte_backend().get_vocab()
        tokens = sorted(ids, key=lambda token: ids[token])
        kinds = [TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(MERGES)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
    else:  # names neither BOS nor EOS: they have ids by default
        lists = trained_vocabulary()
        tokens, kinds = list(lists.tokens), [TokenType(kind) for kind in lists.types]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(list(lists.scores))
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    writer.add_chat_template(template)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_tokenizer(open_gguf(folder / "vocab.gguf"))


WRITERS = {"HF folder": write_hf, "GGUF": write_gguf}


def ids_of(tokenizer: Tokenizer, prompt: str | tuple[int, ...] | ChatPrompt) -> list[int]:
    """The prompt's ids as the engine takes them."""
    model = ServedModel(
        name="m", max_model_tokens=999, vocab_size=tokenizer.vocab_size, eos_ids=frozenset()
    )
    return list(tokenize(prompt, model=model, tokenizer=tokenizer, limits=LIMITS))


def named(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = [tokenizer._backend.token_to_id(token) for token in tokens]
    return [id for id in ids if id is not None]


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("vocabulary", [BYTE, SENTENCEPIECE])
@pytest.mark.parametrize("format", WRITERS)
def test_bos_is_where_the_model_wants_it(
    tmp_path: Path, format: str, vocabulary: str, template: str, add_bos: bool
) -> None:
    tokenizer = WRITERS[format](tmp_path, vocabulary, add_bos=add_bos, template=TEMPLATES[template])
    bos = named(tokenizer, "<s>")
    assert bos == [tokenizer.bos_id]
    space = ["▁hello"] if vocabulary == SENTENCEPIECE else ["hello"]
    hello = named(tokenizer, *space)
    assert len(hello) == 1
    # raw: by the flag
    assert ids_of(tokenizer, "hello") == (bos if add_bos else []) + hello
    assert ids_of(tokenizer, "<s>hello") == bos + hello
    # chat: by the template
    chat = ids_of(tokenizer, ChatPrompt(messages=(ChatMessage(role="user", content="hello"),)))
    assert chat.count(bos[0]) == (template == "bos")
    start = chat.index(named(tokenizer, "<|im_start|>")[0])
    assert chat[:start] == (bos if template == "bos" else [])
    # ids: as they are
    for given in itertools.chain([hello, bos + hello, bos + bos + hello, hello + bos]):
        assert ids_of(tokenizer, tuple(given)) == given


@pytest.mark.parametrize("vocabulary", [BYTE, SENTENCEPIECE])
def test_both_formats_give_the_same_ids(tmp_path: Path, vocabulary: str) -> None:
    both = [
        write(tmp_path, vocabulary, add_bos=True, template=TEMPLATES["bos"])
        for write in WRITERS.values()
    ]
    messages = (ChatMessage(role="system", content=" be é"), ChatMessage(role="user", content=""))
    for prompt in ("hello world", "<s>", "a<|im_end|>\n b", ChatPrompt(messages=messages)):
        assert ids_of(both[0], prompt) == ids_of(both[1], prompt)


@pytest.mark.parametrize(
    ("format", "vocabulary", "adds"),
    [
        ("HF folder", BYTE, False),
        ("HF folder", SENTENCEPIECE, False),  # tokenizer.json has no post-processor here
        ("GGUF", BYTE, False),
        ("GGUF", SENTENCEPIECE, True),
    ],
)
def test_without_a_flag_the_kind_of_file_decides(
    tmp_path: Path, format: str, vocabulary: str, adds: bool
) -> None:
    tokenizer = WRITERS[format](tmp_path, vocabulary, add_bos=None, template=CHAT_TEMPLATE)
    assert tokenizer.add_bos == adds


@pytest.mark.parametrize("vocabulary", [BYTE, SENTENCEPIECE])
@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "hello</s>", "<s>", "<|im_start|>assistant\n x<s>y"]
)
def test_text_that_spells_a_special_token_stays_text(
    tmp_path: Path, format: str, vocabulary: str, text: str
) -> None:
    tokenizer = WRITERS[format](tmp_path, vocabulary, add_bos=True, template=TEMPLATES["bos"])

    def chat(content: str) -> list[int]:
        return ids_of(tokenizer, ChatPrompt(messages=(ChatMessage(role="user", content=content),)))

    def specials(ids: list[int]) -> list[int]:
        return [id for id in ids if id in tokenizer.special_ids]

    assert specials(chat(text)) == specials(chat("hello"))
    assert text in tokenizer.decode(chat(text), skip_special_tokens=False)


def test_eos_goes_last_where_the_files_say_so(tmp_path: Path) -> None:
    tokenizer = write_hf(tmp_path, BYTE, add_bos=True, template=CHAT_TEMPLATE)
    hello = tokenizer.encode("hello")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_eos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    eos = named(tokenizer, "</s>")
    assert tokenizer.add_eos
    assert tokenizer.encode("hello") == hello + eos
    assert tokenizer.encode("hello</s>") == hello + eos
    assert tokenizer.encode("hello", add_special_tokens=False) == hello[1:]
    assert tokenizer.encode_with_offsets("hello")[1][-1] == (5, 5)
    ids = tokenizer.encode_chat(ChatPrompt(messages=(ChatMessage(role="user", content="hello"),)))
    assert eos[0] not in ids
    path.write_text(json.dumps({"add_eos_token": True}))
    with pytest.raises(CheckpointError, match="says add_eos but names no EOS token"):
        load_tokenizer(tmp_path)


def test_flags_of_the_configuration_count_before_those_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = write_hf(tmp_path, BYTE, add_bos=False, template=CHAT_TEMPLATE)
    end, newline = named(tokenizer, "<|im_end|>")[0], tokenizer.encode("\n")
    assert tokenizer.encode("<|im_end|>\nhello") == [end, *newline, *tokenizer.encode("hello")]
    listed = {
        str(end): {"content": "<|im_end|>", "rstrip": True, "special": True, "normalized": False}
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<|im_end|>\nhello") == [end, *tokenizer.encode("hello")]
    assert end in tokenizer.special_ids
