"""The tokenizer that a GGUF file's metadata holds."""

import tokenizers

from jaxserve.checkpoint.gguf_file import GgufFile
from jaxserve.errors import CheckpointError
from jaxserve.text.byte_bpe import build_byte_bpe, build_marked_bpe
from jaxserve.text.end_of_turn import find_end_of_turn_ids
from jaxserve.text.pre_kinds import find_pre_kind
from jaxserve.text.sentencepiece import build_sentencepiece_bpe
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.vocabulary import SPECIAL_TYPES, TokenType, Vocabulary, build_vocabulary

SUPPORTED_MODELS = "gpt2 (byte-level BPE), llama (SentencePiece BPE), gemma4 (BPE with bytes)"
REFUSED_MODELS = {"bert": "WordPiece", "t5": "SentencePiece unigram", "rwkv": "RWKV's trie"}
# Of a SentencePiece vocabulary whose file does not name them (llama.cpp's defaults).
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
# In Phi-3's own files these special tokens leave the white space after them alone.
PHI3_KEEPS_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer rebuilt from the metadata.

    EOS is the union of eos, eot and eom ids, and of the end-of-turn token the chat template writes.

    Raises:
      CheckpointError: the vocabulary's kind is not supported, or its lists are damaged.
    """
    vocabulary = _read_vocabulary(file)
    model = file.metadata.get("tokenizer.ggml.model")
    adds_bos, defaults = False, dict[str, int]()
    match model:
        case "gpt2":
            pre_name = file.metadata.get("tokenizer.ggml.pre")
            pre = find_pre_kind(None if pre_name is None else str(pre_name))
            adds_bos = pre.adds_bos
            merges = _strings(file, "tokenizer.ggml.merges")
            backend = build_byte_bpe(vocabulary, merges, pre=pre)
        case "gemma4":
            adds_bos = True
            backend = build_marked_bpe(vocabulary, _strings(file, "tokenizer.ggml.merges"))
        case "llama":
            adds_bos, defaults = True, SENTENCEPIECE_IDS
            backend = _build_sentencepiece(file, vocabulary)
        case _:
            kind = f" ({REFUSED_MODELS[model]})" if model in REFUSED_MODELS else ""
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.model is {model!r}{kind}, which is not supported; "
                f"supported are {SUPPORTED_MODELS}; use the model's Hugging Face folder instead"
            )
    return _with_roles(file, backend, adds_bos=adds_bos, default_ids=defaults)


def _build_sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    swallows_spaces: list[str] = []
    if file.metadata.get("general.architecture") == "phi3":
        typed = vocabulary.of_type(*SPECIAL_TYPES, TokenType.USER_DEFINED)
        swallows_spaces = [token for token in typed if token not in PHI3_KEEPS_SPACES]
    return build_sentencepiece_bpe(
        vocabulary,
        adds_space_prefix=_flag(file, "add_space_prefix", default=True),
        removes_extra_spaces=_flag(file, "remove_extra_whitespaces", default=False),
        swallows_spaces=swallows_spaces,
    )


def _with_roles(
    file: GgufFile,
    backend: tokenizers.Tokenizer,
    *,
    adds_bos: bool,
    default_ids: dict[str, int],
) -> Tokenizer:
    """Returns the tokenizer with its BOS, EOS and chat template, as the metadata says."""
    template = file.metadata.get("tokenizer.chat_template")
    chat_template = template if isinstance(template, str) else None
    tool_template = file.metadata.get("tokenizer.chat_template.tool_use")
    num_tokens = backend.get_vocab_size()
    ids = {
        name: _token_id(file, f"tokenizer.ggml.{name}_token_id", num_tokens, default_ids.get(name))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    eos_ids = {id for id in (ids["eos"], ids["eot"], ids["eom"]) if id is not None}
    named = {
        "bos_token": ids["bos"],
        "eos_token": ids["eos"],
        "unk_token": ids["unknown"],
        "pad_token": ids["padding"],
    }
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        eos_ids=eos_ids | find_end_of_turn_ids(backend, chat_template),
        add_bos=_flag(file, "add_bos_token", default=adds_bos),
        add_eos=_flag(file, "add_eos_token", default=False),
        chat_template=chat_template,
        tool_template=tool_template if isinstance(tool_template, str) else None,
        named_tokens={
            name: token
            for name, id in named.items()
            if id is not None and (token := backend.id_to_token(id)) is not None
        },
    )


def _read_vocabulary(file: GgufFile) -> Vocabulary:
    return build_vocabulary(
        _strings(file, "tokenizer.ggml.tokens"),
        types=_token_types(file),
        scores=_scores(file),
    )


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if isinstance(value, bool):
        return value
    raise CheckpointError(
        f"{file.path}: tokenizer.ggml.{name} is {value!r}, but must be true or false"
    )


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [str(item) for item in value]
    raise CheckpointError(
        f"{file.path}: the list {key} is missing; the file has no whole tokenizer"
    )


def _token_types(file: GgufFile) -> list[int]:
    value = file.metadata.get("tokenizer.ggml.token_type", [])
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return [int(item) for item in value]
    raise CheckpointError(f"{file.path}: tokenizer.ggml.token_type must be a list of whole numbers")


def _scores(file: GgufFile) -> list[float]:
    value = file.metadata.get("tokenizer.ggml.scores", [])
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return [float(item) for item in value]
    raise CheckpointError(f"{file.path}: tokenizer.ggml.scores must be a list of numbers")


def _token_id(file: GgufFile, key: str, num_tokens: int, default: int | None) -> int | None:
    value = file.metadata.get(key, default)
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < num_tokens:
        return value
    raise CheckpointError(f"{file.path}: {key} is {value}, but the vocabulary has {num_tokens} ids")
