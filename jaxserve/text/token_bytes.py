"""What bytes a token stands for, by the tokenizer's decoder."""

import dataclasses
import functools
import json
import re

import tokenizers

from jaxserve.errors import CheckpointError

SUPPORTED = "ByteLevel, Metaspace, ByteFallback, Fuse, Replace and Strip of spaces, or none"
SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ByteRules:
    """How a vocabulary spells bytes.

    A token's bytes never depend on its neighbours, so texts can be decoded in any pieces.

    Attributes:
      byte_level: each character of a token is one byte (GPT-2's alphabet).
      byte_fallback: "<0x0A>" is that one byte.
      space_marks: "▁" is a space.
      strips_first_space: an encoded text begins with a space that the text did not have.
      separator: between two tokens; a space for word vocabularies without a decoder.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    space_marks: bool = False
    strips_first_space: bool = False
    separator: bytes = b""

    def spell(self, token: str) -> bytes:
        """Returns the bytes of an ordinary (not added) token."""
        if self.byte_level:
            alphabet = byte_alphabet()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return self.spell_added(token)

    def spell_added(self, token: str) -> bytes:
        """Returns the bytes of an added token; Gemma's runs of spaces are added ones."""
        return (token.replace(SPACE_MARK, " ") if self.space_marks else token).encode()


def read_byte_rules(backend: tokenizers.Tokenizer) -> ByteRules:
    """Returns the rules of this tokenizer's decoder.

    Raises:
      CheckpointError: the decoder works in a way that is not known here.
    """
    if backend.decoder is None:
        return ByteRules(separator=b" ")
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    rules = ByteRules()
    for step in steps:
        rules = _add_step(rules, step)
    return rules


def _add_step(rules: ByteRules, step: dict[str, object]) -> ByteRules:
    match step:
        case {"type": "ByteLevel"}:
            return dataclasses.replace(rules, byte_level=True)
        case {"type": "ByteFallback"}:
            return dataclasses.replace(rules, byte_fallback=True)
        case {"type": "Fuse"}:
            return rules
        case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
            return dataclasses.replace(rules, space_marks=True)
        case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
            return dataclasses.replace(rules, strips_first_space=True)
        case {"type": "Metaspace", "replacement": "\u2581"}:
            strips = step.get("prepend_scheme", "always") != "never"
            return dataclasses.replace(rules, space_marks=True, strips_first_space=strips)
    raise CheckpointError(
        f"the tokenizer's decoder has a step {step!r}, which is not supported; "
        f"supported are {SUPPORTED}"
    )


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte, as character to byte.

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 and up:
    " " is "Ġ". From `bytes_to_unicode` in openai/gpt-2 src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
