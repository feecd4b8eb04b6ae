"""Starts workers and a gateway on this machine, and ends them: for `scripts/judges/smg`."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

WORKER = (
    "--vllm-engine", "--log-level", "warning",
    "--set", "model.max_model_tokens=1024", "--set", "scheduler.max_seqs=8",
)  # fmt: skip
START_S = 300.0
END_S = 60.0


class Worker:
    """A jaxserve process with all its doors."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.grpc_port, self.http_port, self.metrics_port = ports
        self.command = [
            str(Path(sys.executable).with_name("jaxserve")), "serve", *WORKER,
            "--port", str(self.grpc_port), "--http-port", str(self.http_port),
            "--metrics-port", str(self.metrics_port),
        ]  # fmt: skip
        self.url = f"http://127.0.0.1:{self.http_port}"
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")
        self.stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    def is_healthy(self) -> bool:
        with contextlib.suppress(grpc.RpcError):
            return bool(self.stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest()).healthy)
        return False

    def read_tokenizer(self) -> tuple[bytes, str]:
        """Returns the archive and its digest."""
        chunks = list(self.stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
        return b"".join(chunk.data for chunk in chunks), str(chunks[-1].sha256)

    def count(self, name: str, **labels: str) -> int:
        """Returns the sum of a counter's samples that have these labels."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = httpx.get(url).raise_for_status().text
        return round(
            sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == f"jaxserve_{name}_total"
                and labels.items() <= sample.labels.items()
            )
        )


def gateway_command(
    smg: str, workers: Sequence[Worker], ports: Sequence[int], tokenizer: Path
) -> list[str]:
    """Returns the command of a gateway that asks the workers in turn."""
    port, metrics_port = ports
    return [
        smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port),
        "--worker-urls", *(f"grpc://127.0.0.1:{worker.grpc_port}" for worker in workers),
        "--backend", "vllm", "--model-path", str(tokenizer),
    ]  # fmt: skip


@contextlib.contextmanager
def running(command: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a process in the block, and ends it by SIGTERM as an operator would.

    Raises:
      SystemExit: it did not end in time, or a worker not with 0.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        yield process
    except BaseException:
        print(f"--- the end of {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
        process.kill()
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code not in (0, -signal.SIGTERM):
        raise SystemExit(f"{log.name}: {command[0]} ended with {code}")


def wait_until(condition: Callable[[], bool], what: str, *processes: Any) -> float:  # noqa: ANN401
    """Returns the seconds until the condition held.

    Raises:
      SystemExit: it does not, or one of the processes has ended.
    """
    started_s = time.monotonic()
    while not condition():
        for process in processes:
            if process.poll() is not None:
                raise SystemExit(f"{what}: a process ended with {process.returncode}")
        if time.monotonic() - started_s > START_S:
            raise SystemExit(f"{what}: not within {START_S:.0f} s")
        time.sleep(0.2)
    return time.monotonic() - started_s


def answers(url: str) -> bool:
    """Whether it answers with 200."""
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    return False


def extract(archive: bytes, folder: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        files.extractall(folder)


def free_ports(count: int) -> list[int]:
    """Returns ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
