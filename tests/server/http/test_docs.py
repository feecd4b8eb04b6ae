"""docs/http.md has every field, path and status."""

import re
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server.http.openapi import build_openapi
from jaxserve.server.openai import ENDPOINTS
from jaxserve.server.status import TABLE

TEXT = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", TEXT))


def test_every_field_of_a_body_is_explained() -> None:
    fields = {name for body in ENDPOINTS.values() for name in body.model_fields}
    assert fields - NAMED == set()


def test_every_path_is_there() -> None:
    paths = build_openapi()["paths"]
    assert isinstance(paths, dict)
    named = {name.split()[-1] for name in NAMED}
    assert paths.keys() - named == set()


def test_every_status_and_code_is_there() -> None:
    row = TABLE[ConfigError]
    for kind, found in TABLE.items():
        reason = found.reason or getattr(kind, "reason", "")
        if found == row or kind.__name__ in (
            "RequestError",
            "ReloadError",
            "RequestCancelledError",
        ):
            continue  # none of these reaches an HTTP client as its own
        assert str(reason).lower() in NAMED, kind.__name__
        assert str(found.http) in TEXT
