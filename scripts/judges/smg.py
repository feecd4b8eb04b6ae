"""The gateway smg before two workers: `scripts/judges/smg`."""

import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from scripts.judges.smg_processes import (
    Worker,
    answers,
    extract,
    free_ports,
    gateway_command,
    running,
    wait_until,
)

MODEL = "smollm2-135m-instruct"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}


def chat(**fields: object) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": fields.pop("say", "Name three colours.")}]
    return CHAT, {"model": MODEL, "messages": messages, "temperature": 0, **fields}


def completion(prompt: str, **fields: object) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": chat(max_tokens=24),
    "chat to its end": chat(say="Say hello.", max_tokens=80),
    "chat, several turns": (
        CHAT,
        {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": 12,
            "messages": [
                {"role": "system", "content": "Answer in one word. \N{SNOWMAN}"},
                {"role": "user", "content": "Which colour has the sky?"},
                {"role": "assistant", "content": "Blue."},
                {"role": "user", "content": "And grass?"},
            ],
        },
    ),
    "chat, drawn by a seed": chat(max_tokens=16, temperature=0.9, top_p=0.9, top_k=40, seed=11),
    "chat, two choices": chat(max_tokens=12, temperature=1.0, seed=3, n=2),
    "chat, a stop string": chat(max_tokens=40, stop=["obvious"]),
    "chat, log-probabilities": chat(max_tokens=5, logprobs=True, top_logprobs=3),
    "chat, a JSON schema": chat(max_tokens=60, response_format=FORM),
    "chat, penalties": chat(max_tokens=16, frequency_penalty=1.0, repetition_penalty=1.2),
    "completion": completion("The capital of France is", max_tokens=8),
    "completion, not ASCII": completion("Ein schöner Tag \N{EN DASH} 日本", max_tokens=8),
    "completion, a seed": completion("Once", max_tokens=12, temperature=1.0, seed=5),
    "completion, no EOS": completion("The end.", max_tokens=30, ignore_eos=True),
}


def told(body: dict[str, Any]) -> dict[str, Any]:
    """Returns what a whole answer says, without what is each server's own."""
    usage = body["usage"]
    choices = []
    for choice in sorted(body["choices"], key=lambda choice: int(choice["index"])):
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        numbers = [
            (
                entry["token"],
                round(entry["logprob"], 4),
                [t["token"] for t in entry["top_logprobs"]],
            )
            for entry in logprobs
        ]
        choices.append((text, choice["finish_reason"], numbers))
    return {"choices": choices, "usage": (usage["prompt_tokens"], usage["completion_tokens"])}


def ask(url: str, case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    path, body = case
    reply = httpx.post(f"{url}{path}", json=body, timeout=300)
    if reply.status_code != 200:
        raise SystemExit(f"{url}{path}: {reply.status_code} {reply.text[:500]}")
    return told(reply.json())


def read_events(lines: Sequence[str]) -> dict[str, Any]:
    """Returns what a stream says, as `told` does; without log-probabilities."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        raise SystemExit(f"a stream ended with {events[-1][:300]}")
    chunks = [json.loads(event) for event in events[:-1]]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        index = int(choice["index"])
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        texts[index] = texts.get(index, "") + (text or "")
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    return {
        "choices": [(texts[index], reasons[index], []) for index in sorted(texts)],
        "usage": (usage["prompt_tokens"], usage["completion_tokens"]),
    }


def ask_stream(url: str, case: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    path, body = case
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}{path}", json=asked, timeout=300) as reply:
        lines = list(reply.iter_lines())
        if reply.status_code != 200:
            raise SystemExit(f"{url}{path}: {reply.status_code} {lines}")
    return read_events(lines)


def compare(gateway: str, worker: str) -> int:
    """Prints whether each case is the same through the gateway and asked directly."""
    num_faults = 0
    for name, case in CASES.items():
        wanted = ask(worker, case)
        found = {"whole": ask(gateway, case)}
        if "logprobs" not in case[1]:
            found["stream"] = ask_stream(gateway, case)
        wrong = {way: said for way, said in found.items() if said != wanted}
        prompt, output = wanted["usage"]
        state = "differs" if wrong else "the same"
        print(f"  {name:<24} {prompt:>4} + {output:>3} tokens  {', '.join(found):<14} {state}")
        for way, said in wrong.items():
            print(f"    {way}: {said}\n    worker: {wanted}")
        num_faults += len(wrong)
    return num_faults


def leave(gateway: str, workers: Sequence[Worker]) -> int:
    """Goes away in the middle of a stream; its request must end, by the gateway's Abort."""
    aborts = sum(w.count("rpcs", method="VllmEngine/Abort", code="OK") for w in workers)
    path, body = chat(max_tokens=900, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{gateway}{path}", json=body, timeout=300) as reply:
        for _, _line in zip(range(8), reply.iter_lines(), strict=False):
            pass
    left_s = time.monotonic()
    wait_until(
        lambda: sum(w.count("requests_finished", reason="cancelled") for w in workers) == 1,
        "a request whose client has gone",
    )
    took_s = time.monotonic() - left_s
    wait_until(
        lambda: (
            sum(w.count("rpcs", method="VllmEngine/Abort", code="OK") for w in workers) > aborts
        ),
        "an Abort",
    )
    print(f"  a client that leaves: cancelled after {took_s:.2f} s, with an Abort")
    return 0


def refuse(gateway: str) -> int:
    """A request that is too long is the client's fault there as well, and says why."""
    path, body = chat(max_tokens=5000)
    reply = httpx.post(f"{gateway}{path}", json=body, timeout=300)
    message = reply.json()["error"]["message"]
    is_right = reply.status_code == 400 and "max_tokens is 5000" in message
    print(f"  a request too long: {reply.status_code} {message[:90]}")
    return 0 if is_right else 1


COUNTERS = ("requests_submitted", "prompt_tokens", "output_tokens", "requests_refused")


async def load(gateway: str, workers: Sequence[Worker], *, count: int, at_once: int) -> int:
    """Sends requests, some streamed; counts what clients saw and what workers did."""
    before = [{name: w.count(name) for name in COUNTERS} for w in workers]
    gate, usages, errors = asyncio.Semaphore(at_once), list[tuple[int, int]](), list[str]()

    async def send(number: int) -> None:
        asked = {"say": f"Tell me about the number {number}.", "max_tokens": 8 + number % 17}
        path, body = (
            chat(**asked)
            if number % 2
            else completion(f"Once there were {number}", max_tokens=6 + number % 9)
        )
        if number % 3 == 0:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with gate:
            reply = await client.post(f"{gateway}{path}", json=body)
        if reply.status_code != 200:
            errors.append(f"{reply.status_code} {reply.text[:200]}")
            return
        said = read_events(reply.text.splitlines()) if "stream" in body else told(reply.json())
        usages.append(said["usage"])

    started_s = time.monotonic()
    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(send(number) for number in range(count)))
    took_s = time.monotonic() - started_s
    done = [
        {name: w.count(name) - was[name] for name in COUNTERS}
        for w, was in zip(workers, before, strict=True)
    ]
    seen = (len(usages), sum(p for p, _ in usages), sum(c for _, c in usages))
    print(f"  {count} requests, {at_once} at once: {took_s:.1f} s, {len(errors)} errors")
    print(f"    {'':<10} {'requests':>8} {'prompt tokens':>14} {'output tokens':>14}")
    for index, row in enumerate(done):
        submitted, prompt, output = (row[name] for name in COUNTERS[:3])
        print(f"    worker {index:<3} {submitted:>8} {prompt:>14} {output:>14}")
    print(f"    {'clients':<10} {seen[0]:>8} {seen[1]:>14} {seen[2]:>14}")
    total = tuple(sum(row[name] for row in done) for name in COUNTERS[:3])
    for error in errors[:3]:
        print(f"    {error}")
    is_right = (
        not errors
        and seen == total
        and all(row["requests_submitted"] for row in done)
        and not any(row["requests_refused"] for row in done)
    )
    return 0 if is_right else 1


def judge(smg: str, folder: Path, *, count: int, at_once: int) -> int:
    """Returns the number of faults."""
    ports = free_ports(10)
    workers = [Worker(ports[:3]), Worker(ports[3:6])]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(running(worker.command, folder / f"worker{index}.log"))
            for index, worker in enumerate(workers)
        ]
        took_s = wait_until(lambda: all(w.is_healthy() for w in workers), "workers", *processes)
        archives = [worker.read_tokenizer() for worker in workers]
        archive, sha256 = archives[0]
        num_faults = int(archives[1] != archives[0])
        num_faults += int(hashlib.sha256(archive).hexdigest() != sha256)
        extract(archive, folder / "tokenizer")
        print(f"two workers after {took_s:.0f} s; tokenizer {len(archive)} bytes, {sha256[:12]}")

        gateway = f"http://127.0.0.1:{ports[6]}"
        command = gateway_command(smg, workers, ports[6:8], folder / "tokenizer")
        with running(command, folder / "gateway.log") as process:
            wait_ready(gateway, process)
            num_faults += compare(gateway, workers[0].url)
            num_faults += refuse(gateway)
            num_faults += leave(gateway, workers)
            num_faults += asyncio.run(load(gateway, workers, count=count, at_once=at_once))

        fetched = [w.count("rpcs", method="VllmEngine/GetTokenizer") for w in workers]
        gateway = f"http://127.0.0.1:{ports[8]}"
        command = gateway_command(smg, workers, ports[8:10], folder / "nothing")
        with running(command, folder / "gateway2.log") as process:
            wait_ready(gateway, process)
            is_same = ask(gateway, CASES["chat"]) == ask(workers[1].url, CASES["chat"])
            now = [w.count("rpcs", method="VllmEngine/GetTokenizer") for w in workers]
        num_fetched = sum(now) - sum(fetched)
        print(f"  a gateway without a tokenizer: fetched {num_fetched}, the same text: {is_same}")
        num_faults += int(not is_same or not num_fetched)
    return num_faults


def wait_ready(gateway: str, process: object) -> None:
    """Returns when both workers are behind the gateway, and it has a tokenizer."""
    wait_until(lambda: answers(f"{gateway}/readiness"), "the gateway", process)

    def has_both() -> bool:
        stats = httpx.get(f"{gateway}/workers").json()["workers"]
        return sum(bool(worker["is_healthy"]) for worker in stats) == 2

    wait_until(has_both, "the gateway's workers", process)
    case = completion("x", max_tokens=1)
    wait_until(
        lambda: httpx.post(f"{gateway}{case[0]}", json=case[1], timeout=300).status_code == 200,
        "the gateway's tokenizer",
        process,
    )


def main() -> int:
    smg, *numbers = sys.argv[1:]
    count, at_once = (*(int(word) for word in numbers), *(40, 4)[len(numbers) :])
    with tempfile.TemporaryDirectory() as folder:
        num_faults = judge(smg, Path(folder), count=count, at_once=at_once)
    print(f"smg: {num_faults} faults; all processes have ended")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
