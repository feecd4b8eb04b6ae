"""What the page at `/` of the HTTP door is made of, and the figures it shows."""

from jaxserve.server.page.document import build_document
from jaxserve.server.page.load_reply import LoadReply, build_load_reply

__all__ = ["LoadReply", "build_document", "build_load_reply"]
