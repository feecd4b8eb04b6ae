"""What K/V depends on besides token ids: the identity that a cached page is kept under, and keys.

A key is a SHA-256 over typed, length-delimited fields, chained: the identity's, then page by page.
Two identities that differ in anything, even in which field a text stands in, have different keys;
and a page's key is that of all tokens up to its end.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Final, Literal

Digest = Callable[[bytes], bytes]
"""From bytes to their digest. Only tests take another than `sha256`."""

# A change of the encoding below is a new version: old keys then match nothing.
_IDENTITY_DOMAIN: Final = b"jaxserve.prefix.identity.1"
_PAGE_DOMAIN: Final = b"jaxserve.prefix.page.1"

_Value = str | int | bytes | None | tuple["_Value", ...]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class CacheIdentity:
    """Everything but the token ids that decides what K/V holds, and who may share it.

    Two requests share cached K/V only where all of it is equal.

    Attributes:
      weights: digest of the model's weights.
      tokenizer: digest of the tokenizer.
      positions: how positions enter the keys: the rope's kind and numbers, windows.
      kv_dtype: of the cached numbers.
      kv_scales: how they are scaled; "" where they are not.
      page_size: tokens of a page.
      adapter: id of the adapter in force; None is the base model.
      adapter_generation: how often that id was loaded; its content may differ each time.
      contents: (position, digest) of each input that is not text.
      scope: whether `owner` is a tenant or a namespace that the operator lets tenants share.
      owner: the tenant as the server derived it from the credentials, or the namespace's name.
      salt: from the request; only narrows inside the owner's. None where the request has none.
    """

    weights: str
    tokenizer: str
    positions: str
    kv_dtype: str
    page_size: int
    kv_scales: str = ""
    adapter: str | None = None
    adapter_generation: int = 0
    contents: tuple[tuple[int, str], ...] = ()
    scope: Literal["tenant", "shared"] = "tenant"
    owner: str = ""
    salt: str | None = None


def sha256(message: bytes) -> bytes:
    return hashlib.sha256(message).digest()


def identity_key(identity: CacheIdentity, *, digest: Digest = sha256) -> bytes:
    """Returns the key that a chain of pages begins from."""
    fields = [
        (field.name, getattr(identity, field.name)) for field in dataclasses.fields(CacheIdentity)
    ]
    return digest(_encode((_IDENTITY_DOMAIN, *fields)))


def page_key(parent: bytes, token_ids: Sequence[int], *, digest: Digest = sha256) -> bytes:
    """Returns the key of a page that follows the page, or the identity, with the key `parent`.

    Args:
      token_ids: the page's; int64, whatever they are.
    """
    count = len(token_ids)
    tokens = struct.pack(f"<Q{count}q", count, *token_ids)
    return digest(_PAGE_DOMAIN + struct.pack("<Q", len(parent)) + parent + tokens)


def find_difference(first: CacheIdentity, second: CacheIdentity) -> str | None:
    """Returns the first field in which two identities differ; None if they are equal."""
    for field in dataclasses.fields(CacheIdentity):
        if getattr(first, field.name) != getattr(second, field.name):
            return field.name
    return None


def _encode(value: _Value) -> bytes:
    """Returns a value's type, the length of its bytes, and those: no two values give the same.

    A tuple's bytes are those of its parts, one after another.
    """
    match value:
        case None:
            return _frame(b"n", b"")
        case str():
            return _frame(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _frame(b"b", value)
        case int():
            return _frame(b"i", b"%d" % value)
        case tuple():
            return _frame(b"t", b"".join(map(_encode, value)))


def _frame(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<Q", len(content)) + content
