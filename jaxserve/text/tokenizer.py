"""Text to token ids and back, for one model."""

import copy
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Literal

import tokenizers

from jaxserve.errors import CheckpointError, InvalidRequestError
from jaxserve.request import ChatPrompt
from jaxserve.text.chat_templates import ChatTemplates
from jaxserve.text.end_of_turn import find_end_of_turn_ids
from jaxserve.text.messages import build_messages
from jaxserve.text.shield import Shield, split_marked, strings_in
from jaxserve.text.token_bytes import read_byte_rules

NUM_UINT32 = 1 << 32
LONG_CHARS = 4096  # up to this, the front ends have a text encoded on their event loop


class Tokenizer:
    """One vocabulary with its special tokens and chat template. Immutable, for any thread.

    BOS: `encode` puts it first where the model wants it (`add_bos`), unless the text already
    spells it there; `encode_chat` never adds one, since a template writes its own. EOS is put last
    in the same way by the few models that want it (`add_eos`). Token ids given by a caller are not
    touched.

    Special tokens: in a raw text they are parsed ("<s>" is one id). In a chat only those that the
    template writes are; a caller's text never becomes one.

    Attributes:
      bos_id: None if there is none.
      eos_ids: the ids that end an output, from all sources the loader knew.
      tool_template: takes the place of `chat_template` where there are tools; None for most.
      templates: both of them, to render with.
      add_bos: whether `encode` puts BOS (or the model's other prefix ids) first.
      add_eos: whether `encode` puts EOS (or the model's other suffix ids) last.
      special_ids: left out of text by `skip_special_tokens`.
      vocab_size: highest id + 1.
      separator: bytes between tokens; empty but for word vocabularies.
      strips_first_space: an encoded text begins with a space that the text did not have.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Args:
        eos_id: the one that `add_eos` appends.
        add_bos: None asks the tokenizer's own post-processor; so does `add_eos`.
        named_tokens: what templates see, such as {"bos_token": "<s>"}.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Without added tokens: the same splits and merges, but no string is special.
        self._plain = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self._added = {
            id: token.content for id, token in backend.get_added_tokens_decoder().items()
        }
        self.special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.bos_id = bos_id
        self.eos_ids = frozenset(eos_ids)
        before, after = _read_surrounding_ids(backend)
        self._prefix_ids = _choose_ids("bos", add_bos, bos_id, before)
        self._suffix_ids = _choose_ids("eos", add_eos, eos_id, after)
        self.add_bos, self.add_eos = bool(self._prefix_ids), bool(self._suffix_ids)
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._rules = read_byte_rules(backend)
        self.separator = self._rules.separator
        self.strips_first_space = self._rules.strips_first_space
        self._named_tokens = dict(named_tokens or {})
        self.templates = ChatTemplates(
            chat_template, tool_template, named_tokens=self._named_tokens
        )
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_backend(
        cls,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> "Tokenizer":
        """Returns a tokenizer around one of the `tokenizers` library, which it then owns."""
        return cls(
            backend,
            bos_id=bos_id,
            eos_id=eos_id,
            eos_ids=eos_ids,
            add_bos=add_bos,
            add_eos=add_eos,
            chat_template=chat_template,
            tool_template=tool_template,
            named_tokens=named_tokens,
        )

    def with_chat_template(self, source: str) -> "Tokenizer":
        """Returns the same vocabulary with another template, for all conversations."""
        other = copy.copy(self)
        other.__dict__.pop("digest", None)
        other.chat_template, other.tool_template = source, None
        other.templates = ChatTemplates(source, None, named_tokens=self._named_tokens)
        other.eos_ids = self.eos_ids | find_end_of_turn_ids(self._backend, source)
        return other

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over everything that decides which ids a prompt becomes."""
        rest = json.dumps(
            [
                self.bos_id,
                sorted(self.eos_ids),
                self._prefix_ids,
                self._suffix_ids,
                self.chat_template,
                *([self.tool_template] if self.tool_template else []),
            ],
            sort_keys=True,
        )
        return hashlib.sha256(f"{self._backend.to_str()}\0{rest}".encode()).hexdigest()

    def as_files(self) -> dict[str, str]:
        """Returns the texts of a folder's tokenizer files, by name.

        `load_tokenizer` makes of them, and of the same `eos_ids`, a tokenizer with this digest.
        """
        settings: dict[str, object] = dict(self._named_tokens)
        if self.bos_id is not None:
            settings["bos_token"] = self._backend.id_to_token(self.bos_id)
        eos_id = self._backend.token_to_id(str(settings.get("eos_token", "")))
        for name, around, id in (
            ("add_bos_token", self._prefix_ids, self.bos_id),
            ("add_eos_token", self._suffix_ids, eos_id),
        ):
            if not around or around == [id]:  # other ids come from tokenizer.json itself
                settings[name] = bool(around)
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        if self.chat_template is not None and self.tool_template is not None:
            settings["chat_template"] = [
                {"name": "default", "template": self.chat_template},
                {"name": "tool_use", "template": self.tool_template},
            ]
        return {
            "tokenizer.json": self._backend.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(settings, indent=1, sort_keys=True),
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a raw text; special tokens in it are parsed.

        Raises:
          InvalidRequestError: the text is not valid Unicode.
        """
        _check_unicode(text)
        ids = _encode(self._backend, text).ids
        return self._surround(ids) if add_special_tokens else ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns ids and, for each, the [start, end) characters of the text it came from."""
        _check_unicode(text)
        encoding = _encode(self._backend, text)
        ids, offsets = encoding.ids, encoding.offsets
        if not add_special_tokens:
            return ids, offsets
        if self._lacks_prefix(ids):
            offsets = [(0, 0)] * len(self._prefix_ids) + offsets
        if self._lacks_suffix(ids):
            offsets = offsets + [(len(text), len(text))] * len(self._suffix_ids)
        return self._surround(ids), offsets

    def _surround(self, ids: list[int]) -> list[int]:
        prefix = self._prefix_ids if self._lacks_prefix(ids) else []
        suffix = self._suffix_ids if self._lacks_suffix(ids) else []
        return prefix + ids + suffix

    def _lacks_prefix(self, ids: list[int]) -> bool:
        return ids[: len(self._prefix_ids)] != self._prefix_ids

    def _lacks_suffix(self, ids: list[int]) -> bool:
        suffix = self._suffix_ids
        return bool(suffix) and ids[-len(suffix) :] != suffix

    def encode_beginning(self, text: str) -> list[int]:
        """Returns the ids of a text that goes on: as `encode`, without what goes last."""
        ids = self.encode(text, add_special_tokens=False)
        prefix = self._prefix_ids
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_inside(self, text: str) -> list[int]:
        """Returns the ids of a text as they are inside another one; special tokens are parsed."""
        return self._encode_inside(self._backend, text, False)

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Returns the ids of a conversation rendered by the chat template.

        Raises:
          NoChatTemplateError: the model has no chat template.
          InvalidRequestError: the template refuses the conversation, or a text in it cannot be
            encoded as plain text.
        """
        template, traits = self.templates.choose(prompt)
        messages: object = build_messages(prompt.messages, traits)
        variables: dict[str, object] = dict(prompt.template_kwargs)
        if prompt.tools:
            variables["tools"] = list(prompt.tools)
        texts = [*strings_in([messages, variables])]
        for text in texts:
            _check_unicode(text)
        mark = self._shield.pick_mark([*texts, template.source])
        rendered = template.render(
            self._shield.apply(messages, mark),
            add_generation_prompt=prompt.add_generation_prompt,
            variables=self._named_tokens | self._shield_kwargs(variables, mark),
        )
        ids: list[int] = []
        for piece, is_callers in split_marked(rendered, mark):
            ids += self._encode_plain(piece) if is_callers else self._encode_piece(piece, not ids)
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids; unknown ids give none, broken UTF-8 gives U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        pieces = [self.token_bytes(id) for id in token_ids if id not in skipped]
        text = self.separator.join(piece for piece in pieces if piece).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def has_text(self, token_ids: Iterable[int]) -> bool:
        """Whether an id stands for text: it is neither special nor unknown."""
        return any(self.token_bytes(id) for id in token_ids if id not in self.special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes a token stands for; none for an unknown id."""
        piece = self._bytes.get(token_id)
        if piece is None:
            piece = self._bytes[token_id] = self._spell(token_id)
        return piece

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._rules.spell_added(self._added[token_id])
        token = self._backend.id_to_token(token_id) if 0 <= token_id < NUM_UINT32 else None
        return b"" if token is None else self._rules.spell(token)

    def find_specials(self, texts: Iterable[str]) -> dict[str, int]:
        """Returns those texts that are special tokens, with their ids."""
        wanted = set(texts)
        found = {self._added[id]: id for id in self.special_ids}
        return {text: id for text, id in found.items() if text in wanted}

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids that a caller's text must not become: special, BOS and EOS tokens."""
        named = {*self.eos_ids, *([] if self.bos_id is None else [self.bos_id])}
        return self.special_ids | (named & self._added.keys())

    @functools.cached_property
    def _shield(self) -> Shield:
        normalizer = self._backend.normalizer
        return Shield(
            (self._added[id] for id in self._control_ids if self._added[id]),
            normalizer.normalize_str if normalizer is not None else None,
        )

    def _shield_kwargs(self, kwargs: Mapping[str, object], mark: str) -> dict[str, object]:
        return {name: self._shield.apply(value, mark) for name, value in kwargs.items()}

    @functools.cached_property
    def _prefixes_space(self) -> bool:
        """Whether a text's start is encoded with a space that is not in it (sentencepiece)."""
        alone = self._plain.encode("a", add_special_tokens=False).ids
        return self._plain.encode("\na", add_special_tokens=False).ids[-len(alone) :] != alone

    def _encode_piece(self, text: str, is_first: bool) -> list[int]:
        """Returns the ids of a rendered chat's piece in which special tokens are parsed."""
        return self._encode_inside(self._backend, text, is_first)

    def _encode_plain(self, text: str) -> list[int]:
        """Returns ids among which no special one is.

        Raises:
          InvalidRequestError: the vocabulary has no other spelling of this text.
        """
        ids = self._encode_inside(self._plain, text, False)
        if self._control_ids.isdisjoint(ids):
            return ids
        ids = [id for char in text for id in self._encode_inside(self._plain, char, False)]
        if self._control_ids.isdisjoint(ids):
            return ids
        raise InvalidRequestError(
            f"the conversation contains {text!r}, which this tokenizer can only encode as a "
            "special token; remove it",
            field="chat.messages",
        )

    def _encode_inside(self, backend: tokenizers.Tokenizer, text: str, is_first: bool) -> list[int]:
        """Returns the ids of a text that stands inside another: no space is put before it."""
        if is_first or not self._prefixes_space:
            return list(_encode(backend, text).ids)
        newline = self._plain.encode("\n", add_special_tokens=False).ids
        ids = list(_encode(backend, "\n" + text).ids)
        if ids[: len(newline)] == newline:
            return ids[len(newline) :]
        return list(_encode(backend, text).ids)


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Returns what a text is encoded to; a long one lets other threads run meanwhile.

    `encode` holds the interpreter's lock, and 4 MB take it half a minute. The form for many texts
    does not, but it waits for a place among as many as there are processors, which a short text
    should not.
    """
    if len(text) <= LONG_CHARS:
        return backend.encode(text, add_special_tokens=False)
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _read_surrounding_ids(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Returns what the post-processor puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _choose_ids(
    role: Literal["bos", "eos"], flag: bool | None, token_id: int | None, own: list[int]
) -> list[int]:
    """Returns what goes beside a raw text, by the model's flag, else its post-processor."""
    if flag is None:
        return own
    if not flag:
        return []
    if token_id is None:
        raise CheckpointError(
            f"the tokenizer says add_{role} but names no {role.upper()} token; give it a "
            f"{role}_token ({role}_token_id in GGUF), or set add_{role}_token to false"
        )
    return [token_id]


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text is not valid Unicode at character {error.start}: "
            "a lone surrogate; send well-formed text",
            field="prompt",
        ) from error
