"""Nothing that a client wrote or a model said is in the log, whatever the level and the command."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import jaxserve.engine.start
from jaxserve.cli.log import StderrHandler
from jaxserve.cli.main import main
from jaxserve.client import ChatMessage, ChatPrompt, Client, ServerError
from jaxserve.config import Config
from jaxserve.engine import Engine, ServedModel
from jaxserve.metrics import Metrics
from jaxserve.request import GenerationRequest
from tests.checkpoint.writers import T1, make_weights, write_hf
from tests.engines import build_engine
from tests.fakes import CHAT_TEMPLATE, EOS_ID, say

SECRET = "Xyzzy"  # in prompts, stop strings and whatever else a client sends
SAID = "Plugh"  # what the model says
SMALL = {
    "model.dtype": "float32",
    "model.max_model_tokens": "96",
    "kv.num_pages": "17",
    "scheduler.max_seqs": "2",
    "buckets.decode_seqs": "[2]",
    "buckets.chunk_tokens": "[16]",
    "buckets.chunk_decode_seqs": "[2]",
    "log.interval_s": "0.001",
}
SETS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
PROGRAM = "import sys; from jaxserve.cli.main import main; sys.exit(main())"
JAXSERVE = [sys.executable, "-c", PROGRAM]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("jaxserve")
    before = (root.level, ours.level)
    yield
    root.setLevel(before[0])
    ours.setLevel(before[1])
    root.handlers[:] = [h for h in root.handlers if not isinstance(h, StderrHandler)]


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the commands load an engine that always says the same."""

    def load_engine(
        name: str,
        config: Config,
        *,
        progress: object = None,
        only_for: Callable[[ServedModel], GenerationRequest] | None = None,
        metrics: Metrics | None = None,
    ) -> Engine:
        script = say({None: [*SAID.encode(), EOS_ID]})
        return build_engine(script=script, chat_template=CHAT_TEMPLATE, metrics=metrics)[0]

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_generate_says_neither(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--prompt", SECRET, "--stop", f"{SECRET}!", "--max-tokens", "6"]
    assert main([*words, "--log-level", "debug", "--log-format", log_format]) == 0
    captured = capsys.readouterr()
    assert SAID in captured.out
    assert "finished" in captured.err
    check_log(captured.err, SECRET, SAID)


@pytest.mark.usefixtures("_fake")
def test_batch_says_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        json.dumps({"prompt": SECRET, "max_tokens": 6, "stop": [f"{SECRET}!"]}),
        json.dumps({"prompt": SECRET, "temperature": SECRET}),
        json.dumps({"prompt": [SECRET]}),
        f"{SECRET} {{",
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    words = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert main([*words, "--log-level", "debug"]) != 0, "three lines are bad"
    assert SAID in (tmp_path / "out.jsonl").read_text()
    check_log(capsys.readouterr().err, SECRET, SAID)


@pytest.mark.usefixtures("_fake")
def test_chat_says_neither(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{SECRET[:2]}\n".encode())))
    assert main(["chat", "--max-tokens", "6", "--log-level", "debug"]) == 0
    captured = capsys.readouterr()
    assert SAID in captured.out
    check_log("\n".join(li for li in captured.err.splitlines() if "jaxserve." in li), SECRET, SAID)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_hf(tmp_path_factory.mktemp("models") / "tiny", T1, make_weights(T1))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_real_generate_says_neither(folder: Path) -> None:
    words = ["generate", str(folder), "--prompt", SECRET, "--stop", f"{SECRET}!", "--json"]
    options = ["--ignore-eos", "--max-tokens", "12", "--log-level", "debug", *SETS]
    done = subprocess.run([*JAXSERVE, *words, *options], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert "finished" in done.stderr
    check_log(done.stderr, SECRET, *said(result["text"], result["token_ids"]))


def test_a_real_server_says_nothing_of_any_call(folder: Path) -> None:
    options = ["--port", "0", "--metrics-port", "0", "--log-level", "debug", *SETS]
    with subprocess.Popen(
        [*JAXSERVE, "serve", str(folder), *options], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        log = ""
        while not (found := re.search(r"serving model=\S+ address=(\S+)", log)):
            line = server.stderr.readline()
            assert line, log
            log += line
        with Client(found[1]) as client:
            secrets = call_in_every_way(client)
        server.send_signal(signal.SIGTERM)
        log += server.stderr.read()
    assert server.returncode == 0
    assert log.count(" finished ") == 4
    assert "throughput" in log
    check_log(log, *secrets)


def call_in_every_way(client: Client) -> list[str]:
    """Returns what must not be in the log."""
    sampling = {"max_tokens": 12, "ignore_eos": True, "include_token_ids": True}
    chat = ChatPrompt(messages=(ChatMessage(role="user", content=SECRET),))
    done = [
        client.generate(SECRET, stop_strings=[f"{SECRET}!"], **sampling),  # type: ignore[arg-type]  # by name
        client.generate(chat, seed=1, **sampling),  # type: ignore[arg-type]
        client.generate(SECRET, temperature=1.0, seed=2, request_id="a b", **sampling),  # type: ignore[arg-type]
    ]
    for event in client.stream(SECRET, max_tokens=12):
        assert event is not None
        break  # left early
    client.tokenize(SECRET)
    for wrong in (
        {"stop_strings": [SECRET * 1000]},
        {"model": SECRET},
        {"request_id": f"{SECRET}\n"},
        {"temperature": -1.0},
        {"max_tokens": 10**6},
    ):
        with pytest.raises(ServerError):
            client.generate(SECRET, **wrong)
    return [SECRET, *(part for one in done for part in said(one.text, list(one.token_ids)))]


def said(text: str, token_ids: list[int]) -> list[str]:
    """An output in the forms in which it could be in a log; pieces of it, for it may be cut."""
    assert len(token_ids) == 12
    ids = [", ".join(map(str, token_ids[first : first + 3])) for first in range(0, 12, 3)]
    return [*ids, *(text[first : first + 6] for first in range(0, len(text) - 6, 6))]


def check_log(log: str, *secrets: str) -> None:
    assert log
    for secret in secrets:
        for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1]):
            assert form not in log
