"""An open-loop replay against an engine's own OpenAI server, judged by limits."""

import dataclasses
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.peer.absent import Absent
from bench.peer.process import group_of, last_line
from bench.peer.setup import ROOT, Environment, Setup
from bench.peer.usage import peak_bytes
from bench.peer.variants import MAX_MODEL_TOKENS, Engine, Variant

JAXSERVE: Final = "import sys; from jaxserve.cli.main import main; sys.exit(main())"
READY_TIMEOUT_S: Final = 1800.0
REPLAY_TIMEOUT_S: Final = 900.0
WARM_UP: Final = 8  # requests
# Why an engine has no part in the replay.
NO_ENDPOINT: Final[dict[Engine, str]] = {
    "openvino": "the package openvino-genai has no server of its own",
    "transformers": "`generate` is no server",
}
HEALTH: Final[dict[Engine, str]] = {
    "jaxserve": "/v1/models", "llama.cpp": "/health", "vllm": "/health",
}  # fmt: skip


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ReplayLoad:
    """What every server is asked: the same prompts at the same times.

    Attributes:
      rate: requests a second, Poisson.
      limits: as `jaxserve bench --limit` takes them.
    """

    rate: float
    num_requests: int
    prompt_tokens: str
    output_tokens: str
    limits: Sequence[str]
    seed: int


def serve_command(
    variant: Variant, environment: Environment, *, port: int, threads: int, setup: Setup
) -> list[str | Path]:
    """Returns what starts the engine's server, with as many rows and tokens as its adapter has."""
    options = variant.options
    match variant.engine:
        case "jaxserve":
            settings = (f"{key}={value}" for key, value in options["settings"].items())
            return [
                environment.python, "-c", JAXSERVE, "serve", options["model"],
                "--port", "0", "--http-port", str(port),
                *(word for setting in settings for word in ("--set", setting)),
            ]  # fmt: skip
        case "llama.cpp":
            return [
                setup.folder / "llama.cpp" / "build" / "bin" / "llama-server",
                "--model", options["model"], "--host", "127.0.0.1", "--port", str(port),
                "--parallel", str(options["max_seqs"]), "--threads", str(threads),
                "--ctx-size", str(options["max_seqs"] * options["max_model_tokens"]),
            ]  # fmt: skip
        case "vllm":
            return [
                environment.python, "-m", "vllm.entrypoints.openai.api_server",
                "--model", options["model"], "--dtype", options["dtype"],
                "--host", "127.0.0.1", "--port", str(port),
                "--max-num-seqs", str(options["max_seqs"]),
                "--max-model-len", str(MAX_MODEL_TOKENS),
            ]  # fmt: skip
    raise Absent(NO_ENDPOINT[variant.engine])


def replay(
    variant: Variant, environment: Environment, load: ReplayLoad, setup: Setup, *, threads: int
) -> dict[str, Any]:
    """Returns the result of `jaxserve bench`, and the server's peak of memory.

    Raises:
      Absent: no server, or it or the replay failed.
    """
    port = free_port()
    command = serve_command(variant, environment, port=port, threads=threads, setup=setup)
    log = setup.log(f"serve-{variant.name}")
    # A server may have as many processes as it likes; only the adapter wants one.
    env = {**environment.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as said:
        with group_of(command, env=env, cwd=ROOT, log=said, asked=False) as process:
            wait_ready(process, f"http://127.0.0.1:{port}{HEALTH[variant.engine]}", log)
            result = send(variant, load, port=port, setup=setup)
            return {"result": result, "peak_bytes": peak_bytes(process.pid)}


def send(variant: Variant, load: ReplayLoad, *, port: int, setup: Setup) -> dict[str, Any]:
    """Returns what `jaxserve bench` found.

    Raises:
      Absent: it failed.
    """
    log = setup.log(f"replay-{variant.name}")
    out = log.with_suffix("")
    command = [
        sys.executable, "-c", JAXSERVE, "bench", str(setup.weights / "hf"),
        "--target", f"http://127.0.0.1:{port}/v1",
        "--extras", "jaxserve" if variant.engine == "jaxserve" else "vllm",
        "--rate", f"{load.rate:g}", "--num-requests", str(load.num_requests),
        "--prompt-tokens", load.prompt_tokens, "--output-tokens", load.output_tokens,
        "--warm-up", str(min(WARM_UP, load.num_requests)), "--seed", str(load.seed),
        *(word for limit in load.limits for word in ("--limit", limit)),
        "--out", str(out), "--overwrite", "--quiet",
    ]  # fmt: skip
    with log.open("w") as said:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said,
                stderr=subprocess.STDOUT, timeout=REPLAY_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Absent(f"its replay took more than {REPLAY_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise Absent(f"its replay failed: {last_line(log)} ({log} says more)")
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


def wait_ready(process: subprocess.Popen[str], url: str, log: Path) -> None:
    """Waits until a server says it is ready.

    Raises:
      Absent: it ended, or took too long.
    """
    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise Absent(f"its server ended: {last_line(log)} ({log} says more)")
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.3)
    raise Absent(f"its server was not ready in {READY_TIMEOUT_S:g} s ({log} says more)")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
