"""The page of a live server in headless Chromium: `scripts/judges/page`.

Runs under an interpreter that has httpx and websockets; the server under this project's.
"""

import asyncio
import contextlib
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from scripts.judges.browser import Tab, run_chromium

JAXSERVE = ".venv/bin/jaxserve"
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
WIDTHS = (320, 390, 768, 960, 1280, 1920)
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> **not bold** & so on"
LAST = "#log article:last-of-type"

# Text that is hard to read: its colour against the nearest background, by WCAG 2.2, 1.4.3.
POOR_CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility() || element.matches(":disabled, script, style")) continue;
    const [one, other] = [parse(getComputedStyle(element).color), behind(element)].map(light);
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName} ${element.id} ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""


def events(*deltas: dict[str, Any], finish: str = "stop", end: str = "data: [DONE]\n\n") -> str:
    """Returns a chat's stream as the server writes it."""
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    chunks = [{"object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end


async def check_key(tab: Tab, key: str, folder: Path) -> None:
    """The page asks for a key, again when it is wrong, and keeps it in memory alone."""
    await tab.wait("!document.querySelector('#key-form').hidden")
    await tab.wait("document.activeElement.id === 'key'")
    assert await tab.text("#status") == "key needed"
    await tab.look(width=390, height=844, scheme="light")
    await tab.shoot(folder / "key.png")
    await tab.look(width=1280, height=800, scheme="light")
    await tab.type("jsk_wrong")
    await tab.press("Enter")
    await tab.wait("!document.querySelector('#key-form').hidden")
    await tab.wait("document.activeElement.id === 'key'")
    await tab.type(key)
    await tab.press("Enter")
    await tab.wait("document.querySelector('#status').textContent === 'serving'")
    assert await tab.run("document.activeElement.id") == "ask"
    kept = "localStorage.length + sessionStorage.length + document.cookie.length"
    assert await tab.run(kept) == 0
    told("a key was asked for, a wrong one refused; the right one is in memory alone")


async def check_stream(tab: Tab) -> None:
    """An answer comes piece by piece, and the figures move with it."""
    await tab.type("Tell me a story")
    await tab.press("Enter", shift=True)
    await tab.type("about a river.")
    await tab.press("Enter")
    await tab.wait(f"document.querySelector('{LAST}.assistant')?.ariaBusy === 'true'")
    lengths: list[int] = []
    seen: dict[str, set[str]] = {"#output-rate": set(), "#running": set(), "#kv": set()}
    while await tab.run(f"document.querySelector('{LAST}').ariaBusy") == "true":
        lengths.append(len(await tab.text(f"{LAST} .text")))
        for selector, values in seen.items():
            values.add(await tab.text(selector))
        await asyncio.sleep(0.1)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) >= 5, f"the answer did not stream: {lengths}"
    assert "river." in await tab.text("#log article.user .text")
    answer, note = await tab.text(f"{LAST} .text"), await tab.text(f"{LAST} .note")
    assert re.search(r"\d+ \+ \d+ tokens · first after \d", note), note
    assert answer in await tab.text("#said"), "who listens heard nothing of it"
    assert "1" in seen["#running"], seen
    assert len(seen["#output-rate"]) >= 2, seen
    assert len(seen["#kv"]) >= 2, seen
    assert await tab.run("document.querySelectorAll('#buckets tbody tr').length") >= 1
    assert await tab.run("document.querySelectorAll('#phases tbody tr').length") == 9
    assert await tab.text("#ask") == ""
    told(f"an answer streamed in {len(set(lengths))} sizes seen; {note}")
    told(f"figures that moved: {', '.join(f'{k} {len(v)} values' for k, v in seen.items())}")


async def check_stop(tab: Tab, client: httpx.AsyncClient) -> None:
    """Esc stops an answer, here and in the engine; its part stays in the conversation."""
    await tab.type("Count to a thousand.")
    await tab.press("Enter")
    await tab.wait(f"document.querySelector('{LAST}.assistant .text')?.textContent.length > 10")
    await tab.press("Escape")
    await tab.wait(f"document.querySelector('{LAST}').ariaBusy === 'false'")
    assert "stopped" in await tab.run(f"document.querySelector('{LAST}').textContent")
    async with asyncio.timeout(20):
        while (await load_of(client))["requests"]["running"]:
            await asyncio.sleep(0.1)
    metrics = (await client.get("/metrics")).text
    assert 'jaxserve_requests_finished_total{reason="cancelled"} 1.0' in metrics
    told("Esc stopped an answer, and its request ended as cancelled")


async def check_parts(tab: Tab) -> None:
    """Reasoning and calls are folded, a call's result is asked for, and markup is text."""
    call = {"index": 0, "id": "call_1", "type": "function"}
    named = call | {"function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    calls = [{"tool_calls": [part]} for part in (named, rest)]
    parts: list[dict[str, Any]] = [{"reasoning_content": HOSTILE}, *calls]
    tab.canned.append((200, STREAM, events(*parts, finish="tool_calls")))
    tab.canned.append((200, STREAM, events({"content": HOSTILE})))
    await ask(tab, "How is the weather?")
    assert await tab.text(f"{LAST} details.reasoning pre") == HOSTILE
    assert await tab.text(f"{LAST} details.call summary") == "Tool call: get_weather"
    assert await tab.text(f"{LAST} details.call pre") == '{"city": "Oslo"}'
    assert await tab.run("document.querySelectorAll('#log details[open]').length") == 0
    assert await tab.text("#ask-label") == "Result of get_weather"
    await ask(tab, "12 degrees")
    assert await tab.text(f"{LAST} .text") == HOSTILE
    assert await tab.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert await tab.text("#ask-label") == "Message"
    told("reasoning and calls are folded, a result was given, markup stayed text")


async def check_errors(tab: Tab) -> None:
    """What goes wrong is said in words, and the question is there to be sent again."""
    refusal = json.dumps({"error": {"message": "the queue is full", "type": "", "code": ""}})
    full = (429, {"content-type": "application/json", "retry-after": "7"}, refusal)
    failed = f"data: {json.dumps({'error': {'message': 'the request was too late'}})}\n\n"
    cases = [
        (full, "The server has no room right now. The queue is full. Try again in 7 s."),
        ((200, STREAM, events({"content": "He"}, end="")), "the connection to the server was lost"),
        ((200, STREAM, failed), "The request was too late."),
        ((502, {"content-type": "text/html"}, "<h1>Bad gateway</h1>"), "The server failed."),
    ]
    for canned, words in cases:
        tab.canned.append(canned)
        await ask(tab, "Hello?")
        assert words in await tab.text(f"{LAST} .wrong"), await tab.text(LAST)
        if canned[0] != 200 or canned[2] == failed:
            assert await tab.run("document.querySelector('#ask').value") == "Hello?"
        await tab.run("document.querySelector('#ask').select()")
    await tab.run("document.querySelector('#max-tokens').value = '999999'")
    await ask(tab, "Hello?")
    assert "Max_tokens is 999999" in await tab.text(f"{LAST} .wrong"), await tab.text(LAST)
    await tab.run("document.querySelector('#max-tokens').value = '0'")
    await tab.press("Enter")
    await tab.wait("document.activeElement.id === 'max-tokens'")
    assert "Max tokens" in await tab.text("#wrong")
    await tab.run("document.querySelector('#max-tokens').value = '60'; void 0")
    told(f"{len(cases) + 2} errors were told in words")


async def check_focus(tab: Tab) -> None:
    """Tab goes everywhere, what has the focus shows it, and everything has a name."""
    await tab.run("document.querySelector('#settings').open = true")
    names: list[str] = []
    for _ in range(60):
        await tab.press("Tab")
        if await tab.run("document.activeElement === document.body"):
            continue  # past the end; the next is the first
        role, name = await tab.focused_name()
        assert name, (role, await tab.run("document.activeElement.outerHTML.slice(0, 80)"))
        outline = await tab.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline not in ("none", ""), (role, name)
        if name in names:
            break
        names.append(name)
    wanted = {"To the message", "New chat", "Conversation", "System prompt", "Message", "Send"}
    assert wanted <= set(names), names
    await tab.run("document.querySelector('#settings').open = false")
    told(f"Tab reached {len(names)} named elements, each with a visible focus")


async def check_looks(tab: Tab, folder: Path) -> None:
    """Fits every width, reads well in both schemes; pictures for whoever looks."""
    for width in WIDTHS:
        await tab.look(width=width, height=800, scheme="light")
        wide = "document.documentElement.scrollWidth"
        assert await tab.run(wide) <= width, (width, await tab.run(wide))
    for scheme in ("light", "dark"):
        for width, height in ((1280, 800), (390, 844)):
            await tab.look(width=width, height=height, scheme=scheme)
            await tab.run("document.querySelector('#log').scrollTop = 1e6")
            poor = await tab.run(POOR_CONTRAST)
            assert not poor, (scheme, width, poor)
            await tab.shoot(folder / f"{scheme}-{width}.png")
    animated = "document.getAnimations().length"
    assert await tab.run(animated) == 0
    told(f"no sideways scrolling at {', '.join(map(str, WIDTHS))} px; contrast is at least 4.5")
    told(f"pictures: {folder}")


async def ask(tab: Tab, text: str) -> None:
    """Sends a text and returns when its turn is over."""
    before = await tab.run("document.querySelectorAll('#log article').length")
    await tab.run("document.querySelector('#ask').focus(); document.querySelector('#ask').select()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.wait(f"document.querySelectorAll('#log article').length >= {before} + 2")
    await tab.wait(f"document.querySelector('{LAST}').ariaBusy === 'false'")


async def load_of(client: httpx.AsyncClient) -> dict[str, Any]:
    load: dict[str, Any] = (await client.get("/load")).raise_for_status().json()
    return load


@contextlib.asynccontextmanager
async def run_server(keys: Path) -> AsyncIterator[str]:
    """Serves the demo model to holders of these keys; yields its URL once it is ready."""
    process = await asyncio.create_subprocess_exec(
        JAXSERVE, "serve", "--port", "0", "--http-port", "0",
        "--set", f"auth.keys_file={keys}", "--set", "scheduler.max_seqs=4",
        "--set", "buckets.chunk_tokens=[64]", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    url = ""
    try:
        async with asyncio.timeout(300):
            async for raw in process.stderr:
                line = raw.decode()
                if found := re.search(r"serving HTTP url=(\S+)", line):
                    url = found[1]
                if "engine state=serving" in line:
                    break
            else:
                raise AssertionError("the server ended before it served")
        draining = asyncio.create_task(process.stderr.read())
        yield url
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def judge(chromium: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        keys = Path(made) / "keys.jsonl"
        making = await asyncio.create_subprocess_exec(
            JAXSERVE, "keys", "new", "--file", str(keys), "--tenant", "me",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        key = (await making.communicate())[0].decode().strip()
        headers = {"authorization": f"Bearer {key}"}
        async with (
            run_server(keys) as url,
            httpx.AsyncClient(base_url=url, headers=headers) as client,
            run_chromium(chromium) as tab,
        ):
            assert (await httpx.AsyncClient(base_url=url).get("/load")).status_code == 401
            await tab.look(width=1280, height=800, scheme="light")
            await tab.open(url)
            await check_key(tab, key, folder)
            await tab.run("document.querySelector('#max-tokens').value = '120'; void 0")
            await check_stream(tab)
            await check_stop(tab, client)
            await check_looks(tab, folder)
            await check_parts(tab)
            await check_errors(tab)
            await check_focus(tab)
            await tab.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            for width in (1280, 390):
                await tab.look(width=width, height=800, scheme="dark")
                await tab.shoot(folder / f"unfolded-{width}.png")
            check_traffic(url, tab.requests, tab.faults)
    print("judges/page: all is well")


def check_traffic(url: str, requests: Sequence[str], faults: Sequence[str]) -> None:
    """Nothing was asked of anybody else, and the console complains of nothing unexpected."""
    foreign = [request for request in requests if not request.startswith((url, "data:", "about:"))]
    assert not foreign, foreign
    meant = re.compile(r"Failed to load resource: .*status of (401|400|429|502)")
    unexpected = [fault for fault in faults if not meant.search(fault)]
    assert not unexpected, unexpected
    told(f"{len(requests)} requests, none to another host; nothing in the console")


def told(text: str) -> None:
    print(f"ok: {text}", flush=True)


if __name__ == "__main__":
    asyncio.run(judge(sys.argv[1], Path(sys.argv[2])))
