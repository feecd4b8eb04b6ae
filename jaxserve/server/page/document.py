"""The page as one document whose style and script are named by their hashes."""

import base64
import dataclasses
import hashlib
import importlib.resources
from typing import Final

_STYLE: Final = "page.css"
_SCRIPTS: Final = ("api.js", "chat.js", "live.js")  # one module, in this order
# Nothing is loaded from anywhere, nothing is sent but to this server, no text becomes markup.
_POLICY: Final = (
    "default-src 'none'",
    "script-src '{script}'",
    "style-src '{style}'",
    "img-src data:",  # the icon
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Document:
    """The document's bytes and the policy that allows just what is in them."""

    body: bytes
    policy: str


def build_document() -> Document:
    """Returns the page, put together from the files beside this one."""
    style = _read(_STYLE)
    script = "".join(map(_read, _SCRIPTS))
    body = _read("page.html").replace("@style@", style).replace("@script@", script)
    policy = "; ".join(_POLICY).format(script=_hash(script), style=_hash(style))
    return Document(body=body.encode(), policy=policy)


def _read(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """Returns a source of a Content-Security-Policy (CSP 3, section 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
