"""A tab of headless Chromium over the DevTools protocol: just what `scripts/judges/page` needs."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import websockets

CALL_S = 30.0
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Space": 32}


class Tab:
    """One page, and everything it asked for and complained about.

    Attributes:
      requests: URLs, in order.
      faults: what its console and its exceptions said; failed loads with their status.
      canned: the next replies to requests for chats, (status, headers, body), served here.
    """

    def __init__(self, socket: Any) -> None:  # noqa: ANN401
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.canned: list[tuple[int, dict[str, str], str]] = []
        self._socket = socket
        self._session: str | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read())
        self._doing: set[asyncio.Task[None]] = set()

    async def attach(self) -> None:
        """Opens an empty tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM", "Accessibility"):
            await self.call(f"{domain}.enable")
        await self.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])

    async def open(self, url: str) -> None:
        """Goes to an address and returns when its document is there."""
        await self.call("Page.navigate", url=url)
        await self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:  # noqa: ANN401
        """Calls a method; asserts that the browser did it."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps(message))
        async with asyncio.timeout(CALL_S):
            reply = await self._waiting[number]
        assert "error" not in reply, (method, reply)
        result: dict[str, Any] = reply["result"]
        return result

    async def run(self, expression: str) -> Any:  # noqa: ANN401
        """Returns the value of an expression in the page."""
        reply = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    async def text(self, selector: str) -> str:
        """Returns the text of the last element that matches; empty where none does."""
        quoted = json.dumps(selector)
        text = await self.run(f"[...document.querySelectorAll({quoted})].at(-1)?.textContent")
        return str(text or "")

    async def wait(self, expression: str, *, timeout_s: float = 60.0) -> None:
        """Returns once the expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.run(expression):
                await asyncio.sleep(0.05)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        facts: dict[str, Any] = {
            "key": " " if key == "Space" else key,
            "code": key,
            "windowsVirtualKeyCode": KEYS[key],
            "modifiers": 8 if shift else 0,
        }
        text = {"Enter": "\r", "Space": " "}.get(key)
        down = facts | ({"text": text} if text else {})
        await self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **down)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    async def look(self, *, width: int, height: int, scheme: str, motion: str = "reduce") -> None:
        """Has the page be of this size and for this taste."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1,
            mobile=width < 600,  # scroll bars take no room there
        )  # fmt: skip
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def shoot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def focused_name(self) -> tuple[str, str]:
        """Returns (role, name) of what has the focus, as a screen reader is told."""
        reply = await self.call("Runtime.evaluate", expression="document.activeElement")
        tree = await self.call(
            "Accessibility.getPartialAXTree",
            objectId=reply["result"]["objectId"],
            fetchRelatives=False,
        )
        (node,) = tree["nodes"]
        role, name = node.get("role", {}), node.get("name", {})
        return str(role.get("value", "")), str(name.get("value", ""))

    async def _read(self) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            await self._follow()

    async def _follow(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                self._waiting.pop(message["id"]).set_result(message)
            else:
                self._note(message["method"], message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.faults.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.faults.append(params["entry"]["text"])
            case "Fetch.requestPaused":
                answering = asyncio.create_task(self._answer(params["requestId"]))
                self._doing.add(answering)
                answering.add_done_callback(self._doing.discard)

    async def _answer(self, request: str) -> None:
        if not self.canned:
            await self.call("Fetch.continueRequest", requestId=request)
            return
        status, headers, body = self.canned.pop(0)
        await self.call(
            "Fetch.fulfillRequest",
            requestId=request,
            responseCode=status,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(body.encode()).decode(),
        )


@contextlib.asynccontextmanager
async def run_chromium(program: str) -> AsyncIterator[Tab]:
    """Starts a browser with a profile of its own, and ends all its processes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            url = await _find_url(Path(profile) / "DevToolsActivePort")
            async with websockets.connect(url, max_size=None, proxy=None) as socket:
                tab = Tab(socket)
                await tab.attach()
                yield tab
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its own: the program may be a script
            await process.wait()


async def _find_url(path: Path) -> str:
    """Returns where the browser listens, once it has written that to its profile."""
    async with asyncio.timeout(60):
        while not path.exists() or "\n" not in path.read_text():
            await asyncio.sleep(0.1)
    port, where = path.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{where}"
