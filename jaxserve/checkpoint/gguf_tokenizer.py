"""The tokenizer that a GGUF file's metadata holds."""

from jaxserve.checkpoint.gguf_file import GgufFile
from jaxserve.errors import CheckpointError
from jaxserve.text.backends import build_byte_bpe, find_pre_kind
from jaxserve.text.end_of_turn import find_end_of_turn_ids
from jaxserve.text.tokenizer import Tokenizer


def read_tokenizer(file: GgufFile) -> Tokenizer:
    """Returns the tokenizer rebuilt from the metadata.

    EOS is the union of eos, eot and eom ids, and of the end-of-turn token the chat template writes.

    Raises:
      CheckpointError: the vocabulary's kind is not supported, or its lists are damaged.
    """
    metadata = file.metadata
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {model!r}, which is not supported; supported "
            "is gpt2 (byte-level BPE); use the model's Hugging Face folder instead"
        )
    pre_name = metadata.get("tokenizer.ggml.pre")
    pre = find_pre_kind(None if pre_name is None else str(pre_name))
    backend = build_byte_bpe(
        tokens=_strings(file, "tokenizer.ggml.tokens"),
        token_types=_token_types(file),
        merges=_strings(file, "tokenizer.ggml.merges"),
        pre=pre,
    )
    template = metadata.get("tokenizer.chat_template")
    chat_template = template if isinstance(template, str) else None
    num_tokens = backend.get_vocab_size()
    ids = {
        name: _token_id(file, f"tokenizer.ggml.{name}_token_id", num_tokens)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    eos_ids = {id for id in (ids["eos"], ids["eot"], ids["eom"]) if id is not None}
    named = {
        "bos_token": ids["bos"],
        "eos_token": ids["eos"],
        "unk_token": ids["unknown"],
        "pad_token": ids["padding"],
    }
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre.adds_bos)
    if not isinstance(add_bos, bool):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.add_bos_token is {add_bos!r}, but must be true or false"
        )
    return Tokenizer(
        backend,
        bos_id=ids["bos"],
        eos_ids=eos_ids | find_end_of_turn_ids(backend, chat_template),
        add_bos=add_bos,
        chat_template=chat_template,
        named_tokens={
            name: token
            for name, id in named.items()
            if id is not None and (token := backend.id_to_token(id)) is not None
        },
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


def _token_id(file: GgufFile, key: str, num_tokens: int) -> int | None:
    value = file.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, int) and 0 <= value < num_tokens:
        return value
    raise CheckpointError(f"{file.path}: {key} is {value}, but the vocabulary has {num_tokens} ids")
