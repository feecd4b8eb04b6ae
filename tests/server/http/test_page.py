"""The page at `/`, what a browser is told about it, and the figures it shows."""

import asyncio
import base64
import hashlib
import importlib.resources
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import Config, ServerSection
from jaxserve.metrics import Metrics
from jaxserve.plan import HOST_PHASES
from jaxserve.server.door import Door
from jaxserve.server.http.app import App
from jaxserve.server.http.page import KEPT_S, Page
from jaxserve.server.page import LoadReply, build_load_reply
from tests.server.credentials import sections, write_keys
from tests.server.harness import Steps, until
from tests.server.http.harness import COMPLETIONS, Running, error_of, good, run_app

ROOT = Path(__file__).parents[3]
FILES = {"page.html", "page.css", "api.js", "chat.js", "live.js"}
MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function"
    r"|createContextualFragment|setHTML|srcdoc"
)


async def read_page() -> httpx.Response:
    async with run_app() as running:
        return await running.client.get("/")


@pytest.mark.asyncio
async def test_the_policy_allows_just_the_style_and_the_script_that_are_there() -> None:
    response = await read_page()
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(
        rule.strip().partition(" ")[::2]
        for rule in response.headers["content-security-policy"].split(";")
    )
    for rule, tag in (("script-src", "script"), ("style-src", "style")):
        (text,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", response.text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(rule) == f"'sha256-{hashed}'"
    assert rules == {
        "default-src": "'none'", "img-src": "data:", "connect-src": "'self'", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip


@pytest.mark.asyncio
async def test_a_browser_neither_guesses_nor_frames_nor_keeps_an_old_page() -> None:
    headers = (await read_page()).headers
    wanted = {
        "x-content-type-options": "nosniff", "x-frame-options": "DENY",
        "referrer-policy": "no-referrer", "cache-control": "no-cache",
        "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    }  # fmt: skip
    assert wanted.items() <= dict(headers).items()


@pytest.mark.asyncio
async def test_the_page_needs_nothing_from_anywhere_and_makes_no_markup_of_texts() -> None:
    text = (await read_page()).text
    addresses = set(re.findall(r"https?://[^'\"\s)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<(img|iframe|object|embed|base|form[^>]* action)\b|@import|url\(", text)
    assert re.findall(r"\bsrc=|<link[^>]*href=\"([^\"]{5})", text) == ["data:"]
    assert not re.search(r"\son\w+=|\sstyle=", text), "the policy forbids these"
    assert not MARKUP.search(text)


@pytest.mark.asyncio
async def test_every_field_has_a_label_and_ids_are_there_once() -> None:
    text = (await read_page()).text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    fields = re.findall(r'<(?:input|textarea) id="([^"]+)"', text)
    assert set(fields) == {"key", "system", "temperature", "max-tokens", "tools", "ask"}
    assert set(re.findall(r'<label for="([^"]+)"', text)) == set(fields)
    named = set(re.findall(r'byId\("([^"]+)"\)|\bset\("([^"]+)"', text))
    assert {one or other for one, other in named} <= set(ids)


@pytest.mark.asyncio
async def test_without_the_switch_there_is_no_page() -> None:
    section = ServerSection(http_port=0, page=False)
    async with run_app(section=section) as running:
        refused = await running.client.get("/")
        load = await running.client.get("/load")
    assert error_of(refused)[0] == 404
    assert load.status_code == 200, "it is no part of the page"


@pytest.mark.asyncio
async def test_the_page_needs_no_key_and_its_figures_do(tmp_path: Path) -> None:
    path, (key, _) = write_keys(tmp_path, "a", "b")
    async with run_app(config=sections(path)) as running:
        page = await running.client.get("/")
        refused = await running.client.get("/load")
        answered = await running.client.get("/load", headers={"authorization": f"Bearer {key}"})
    assert page.status_code == 200
    assert error_of(refused)[0] == 401
    assert answered.status_code == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/", "/load"])
async def test_they_are_read_alone(path: str) -> None:
    async with run_app() as running:
        head = await running.client.head(path)
        posted = await running.client.post(path, json={})
    assert head.status_code == 200
    assert error_of(posted)[0] == 405


@pytest.mark.asyncio
async def test_the_figures_are_those_of_the_metrics() -> None:
    steps = Steps()
    async with run_app(steps, page_bytes=64) as running:
        body = {"prompt": "Hi!", "max_tokens": 4}
        call = asyncio.create_task(running.post(COMPLETIONS, body))
        steps.allow(2)
        await until(lambda: running.num_output == 2)
        during, response = await look(running)
        steps.open()
        assert (await call).status_code == 200
        await until(lambda: running.finished("max_tokens") == 1)
        value = running.engine.metrics.value
        after = build_load_reply(running.engine.metrics, running.engine, uptime_s=1.0)
        buckets = sum(bucket.real_tokens for bucket in after.buckets)
        assert (after.totals.prompt_tokens, after.totals.output_tokens) == (3, 4)
        assert after.totals.steps == value("steps_total")
        assert after.totals.rows == value("useful_rows_total")
        assert buckets == value("step_real_tokens_total")
        assert (after.requests.running, after.requests.finished) == (0, 1)
        for phase in HOST_PHASES:
            assert after.phases_s[phase] <= value("step_host_seconds_total", phase=phase)
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert (during.status, during.model) == ("serving", "bytes")
    assert (during.requests.running, during.requests.waiting) == (1, 0)
    assert during.requests.max_running == running.engine.config.scheduler.max_seqs
    assert during.totals.output_tokens == 2
    assert during.kv.usage > 0
    assert 0 < during.kv.used_tokens <= during.kv.total_tokens
    assert set(during.phases_s) == set(HOST_PHASES)


@pytest.mark.asyncio
async def test_the_figures_tell_nothing_of_tenants_and_requests(tmp_path: Path) -> None:
    path, (first, second) = write_keys(tmp_path, "walrus", "b")
    async with run_app(config=sections(path)) as running:
        asking = {"authorization": f"Bearer {first}", "x-request-id": "secret-id"}
        await running.post(COMPLETIONS, {"prompt": "quartz", "max_tokens": 2}, **asking)
        looking = {"authorization": f"Bearer {second}"}
        text = (await running.client.get("/load", headers=looking)).text
        for _ in range(2):
            refused = await running.post(COMPLETIONS, {"prompt": "x", "n": 99}, **asking)
            assert refused.status_code == 400
        told = build_load_reply(running.engine.metrics, running.engine, uptime_s=0.0)
    assert (told.requests.finished, told.requests.refused) == (1, 2)
    assert not re.search("walrus|secret-id|quartz|tenant", text)


@pytest.mark.asyncio
async def test_a_model_that_is_loading_has_figures_too() -> None:
    door = Door(Config(server=ServerSection(http_port=0)), Metrics())
    app = App(door)
    transport = httpx.ASGITransport(app.asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        page = await client.get("/")
        load = LoadReply.model_validate_json((await client.get("/load")).content)
    app.close()
    door.close()
    assert page.status_code == 200
    assert (load.status, load.model, load.requests.max_running) == ("starting", None, 0)


@pytest.mark.asyncio
async def test_however_many_look_the_figures_are_gathered_seldom() -> None:
    now_s = 100.0
    async with run_app() as running:
        page = Page(running.door, clock=lambda: now_s)
        bodies: list[dict[str, Any]] = []
        for step_s in (0.0, KEPT_S / 2, KEPT_S / 2):
            now_s += step_s
            await running.complete(max_tokens=1)
            call = _Call()
            await page.load(call)  # type: ignore[arg-type]  # all that it asks of a call
            bodies.append(json.loads(call.body))
    assert [body["totals"]["output_tokens"] for body in bodies] == [1, 1, 3]
    assert [body["uptime_s"] for body in bodies] == [0.0, 0.0, KEPT_S]


def test_a_wheel_takes_the_pages_files_with_it() -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert target["targets"]["wheel"] == {"packages": ["jaxserve"]}, "all there is in it"
    ignoring = ["git", "check-ignore", *(f"jaxserve/server/page/{name}" for name in sorted(FILES))]
    folder = importlib.resources.files("jaxserve.server.page")
    assert all(folder.joinpath(name).is_file() for name in FILES)
    if (ROOT / ".git").exists():  # what git ignores, hatchling leaves out
        assert subprocess.run(ignoring, cwd=ROOT, check=False).returncode == 1


class _Call:
    def __init__(self) -> None:
        self.body = b""

    async def reply(self, reply: Any) -> None:  # noqa: ANN401
        self.body = reply.body


async def look(running: Running) -> tuple[LoadReply, httpx.Response]:
    response = await running.client.get("/load")
    return LoadReply.model_validate(good(response)), response
