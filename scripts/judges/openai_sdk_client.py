"""A client of a running server with the `openai` package, for `scripts/judges/openai_sdk`.

KEY is of a tenant without limits.
"""

import os
import time
import urllib.request
from typing import Any

import openai

from scripts.judges.checks import Checks

CHAT: list[Any] = [{"role": "user", "content": "Name three rivers."}]
PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
IMMEDIATE_S = 5.0  # for what takes milliseconds, on a busy machine


class Judge:
    def __init__(self, url: str) -> None:
        self.checks = Checks(f"openai {openai.__version__}")
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ["KEY"], max_retries=0)
        self.model = self.client.models.list().data[0].id

    def complete(self, prompt: Any, **more: Any) -> Any:  # noqa: ANN401  # the package's own unions
        return self.client.completions.create(
            **{"model": self.model, "prompt": prompt, **GREEDY, **more}
        )

    def chat(self, messages: Any = CHAT, **more: Any) -> Any:  # noqa: ANN401
        return self.client.chat.completions.create(
            **{"model": self.model, "messages": messages, **GREEDY, **more}
        )

    def metric(self, name: str) -> float:
        headers = {"authorization": f"Bearer {os.environ['KEY']}"}
        request = urllib.request.Request(f"{self.url}/metrics", headers=headers)
        with urllib.request.urlopen(request) as reply:
            text = reply.read().decode()
        lines = [line for line in text.splitlines() if line.startswith(f"jaxserve_{name} ")]
        return float(lines[0].split()[-1])

    def wait_idle(self) -> float:
        """Returns the seconds until nothing runs."""
        begun = time.monotonic()
        while self.metric("requests_running") + self.metric("requests_waiting"):
            if time.monotonic() - begun > IMMEDIATE_S:
                return float("inf")
            time.sleep(0.02)
        return time.monotonic() - begun
