"""Reads the tokenizer of a Hugging Face model folder."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxserve.errors import CheckpointError
from jaxserve.text.backends import read_tokenizer_json
from jaxserve.text.end_of_turn import find_end_of_turn_ids
from jaxserve.text.sentencepiece import build_sentencepiece_bpe
from jaxserve.text.sentencepiece_file import read_sentencepiece_model
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TEMPLATE_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(folder: Path, *, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """Returns the tokenizer of a folder with tokenizer.json and, mostly, tokenizer_config.json.

    Without tokenizer.json, a SentencePiece tokenizer.model is read instead. BOS goes before a raw
    text if `add_bos_token` says so; where it is absent, if tokenizer.json's post-processor puts it
    there. EOS goes after it in the same way.

    Args:
      eos_ids: ids from the model's own configuration; the tokenizer's are added to them.

    Raises:
      CheckpointError: a file is missing, damaged or not supported.
    """
    settings = read_json_object(folder / "tokenizer_config.json")
    if not (folder / "tokenizer.json").exists() and (folder / "tokenizer.model").exists():
        backend, defaults = _read_sentencepiece(folder, settings)
        settings = defaults | settings
    else:
        backend = read_tokenizer_json(folder / "tokenizer.json")
    named = _read_named_tokens(read_json_object(folder / "special_tokens_map.json"))
    named |= _read_named_tokens(settings)
    _add_listed_tokens(backend, settings, folder)
    templates = _read_templates(folder, settings)
    template = templates.get("default")
    ids = {name: backend.token_to_id(token) for name, token in named.items()}
    for name in ("bos_token", "eos_token"):
        if name in named and ids[name] is None:
            logger.warning("%s %r is not in the vocabulary of %s", name, named[name], folder)
    eos_id = ids.get("eos_token")
    return Tokenizer(
        backend,
        bos_id=ids.get("bos_token"),
        eos_id=eos_id,
        eos_ids={
            *eos_ids,
            *([] if eos_id is None else [eos_id]),
            *find_end_of_turn_ids(backend, template),
        },
        add_bos=_read_flag(settings, "add_bos_token", folder),
        add_eos=_read_flag(settings, "add_eos_token", folder),
        chat_template=template,
        tool_template=templates.get("tool_use"),
        named_tokens=named,
    )


def _read_sentencepiece(
    folder: Path, settings: Mapping[str, object]
) -> tuple[tokenizers.Tokenizer, dict[str, object]]:
    """Returns the backend, and what tokenizer_config.json need not say.

    Raises:
      CheckpointError: it cannot be read; the message has the command that makes a tokenizer.json.
    """
    fix = (
        "make its tokenizer.json once, where transformers and sentencepiece are installed: "
        'python -c "from transformers import AutoTokenizer as A; '
        f"A.from_pretrained('{folder}').save_pretrained('{folder}')\""
    )
    if settings.get("legacy") is False:
        raise CheckpointError(
            f"{folder} has only a tokenizer.model and says legacy=false, which is not supported "
            f"for such files; {fix}"
        )
    try:
        model = read_sentencepiece_model(folder / "tokenizer.model")
        backend = build_sentencepiece_bpe(
            model.vocabulary,
            adds_space_prefix=model.adds_space_prefix,
            removes_extra_spaces=model.removes_extra_spaces,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {fix}") from error
    defaults: dict[str, object] = {"add_bos_token": model.bos_id is not None}
    for name, id in (("bos_token", model.bos_id), ("eos_token", model.eos_id)):
        if id is not None:
            defaults[name] = model.vocabulary.tokens[id]
    defaults["added_tokens_decoder"] = _read_added_tokens(folder)
    return backend, defaults


def _read_added_tokens(folder: Path) -> dict[str, object]:
    """Returns added_tokens.json, which older folders have, as `added_tokens_decoder` lists them."""
    listed = read_json_object(folder / "added_tokens.json")
    named = read_json_object(folder / "special_tokens_map.json").get("additional_special_tokens")
    special = {
        token.get("content") if isinstance(token, dict) else token
        for token in (named if isinstance(named, list) else [])
    }
    return {
        str(id): {"content": token, "special": token in special, "normalized": False}
        for token, id in listed.items()
    }


def read_json_object(path: Path) -> dict[str, object]:
    """Returns a JSON file's object; an absent file is an empty one.

    Raises:
      CheckpointError: the file is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\ud" in text.lower():  # half a surrogate pair is JSON, but no text
            json.dumps(value, ensure_ascii=False).encode()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; get the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, but must be a JSON object")
    return value


def _read_named_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the named tokens, each given as a string or as an object with "content"."""
    named = {}
    for name in TEMPLATE_NAMES:
        value = settings.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            named[name] = token
    return named


def _read_flag(settings: Mapping[str, object], name: str, folder: Path) -> bool | None:
    value = settings.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: {name} is {value!r}, but must be true or false"
    )


def _read_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Returns the chat templates by name: default, and for conversations with tools tool_use.

    Files count before tokenizer_config.json, as in transformers.
    """
    templates = _read_listed_templates(folder, settings)
    paths = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    if paths["default"].exists():  # they are all in files then
        templates = {}
    for name, path in paths.items():
        if path.exists():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"cannot read {path}: {error}") from error
    return templates


def _read_listed_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    match settings.get("chat_template"):
        case None:
            return {}
        case str() as template:
            return {"default": template}
        case list() as named if all(_is_named_template(item) for item in named):
            return {item["name"]: item["template"] for item in named}
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects "
        "with name and template; correct it or remove it"
    )


def _is_named_template(item: object) -> bool:
    if not isinstance(item, dict):
        return False
    return isinstance(item.get("name"), str) and isinstance(item.get("template"), str)


def _add_listed_tokens(
    backend: tokenizers.Tokenizer, settings: Mapping[str, object], folder: Path
) -> None:
    """Add tokens as tokenizer_config.json lists them, and see that they get the ids it says.

    Where tokenizer.json has a token too, the flags here count, as in transformers.
    """
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return
    if not isinstance(listed, dict) or not all(map(_is_added_token, listed, listed.values())):
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must give each id an object "
            "with content; get the file again"
        )
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    for text_id, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = entry["content"]
        flags = ("lstrip", "rstrip", "normalized", "single_word")
        fields = {key: bool(entry[key]) for key in flags if key in entry}
        token = AddedToken(content, special=bool(entry.get("special")), **fields)
        if content and repr(token) not in present:
            backend.add_tokens([token])
        if backend.token_to_id(content) != int(text_id):
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {content!r} the id {text_id}, but "
                f"tokenizer.json gives {backend.token_to_id(content)}; get matching files"
            )


def _is_added_token(text_id: str, entry: object) -> bool:
    is_id = text_id.isascii() and text_id.isdecimal()
    return is_id and isinstance(entry, dict) and isinstance(entry.get("content"), str)
