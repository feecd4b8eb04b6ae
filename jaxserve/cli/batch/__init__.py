"""`jaxserve batch`: a file of requests in, a file of replies out, resumable at any line."""

from jaxserve.cli.batch.command import add_parser

__all__ = ["add_parser"]
