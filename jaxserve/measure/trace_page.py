"""A trace as one page that shows it: no other file, and nothing is asked of any network."""

import html
import importlib.resources
import json
from pathlib import Path

from jaxserve.measure.trace import Trace


def build_page(trace: Trace) -> str:
    """Returns the HTML, with the trace within."""
    template = (
        importlib.resources.files("jaxserve.measure").joinpath("trace_page.html").read_text("utf-8")
    )
    facts = trace["otherData"]
    title = html.escape(f"{facts.get('model', '')} · jaxserve trace")
    # within a script a browser looks for its end and for comments, and for nothing else
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    # the title's place comes first, so neither can be taken for the other's
    return template.replace("@trace@", data, 1).replace("@title@", title, 1)


def write_page(trace: Trace, path: Path) -> None:
    path.write_text(build_page(trace), encoding="utf-8", errors="replace")
