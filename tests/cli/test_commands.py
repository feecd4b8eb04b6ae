"""The commands on a fake engine: what goes to stdout, what to stderr, and the exit codes."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jaxserve.engine.start
import jaxserve.server.lifecycle
from jaxserve.cli.main import main
from jaxserve.cli.parser import build_parser
from jaxserve.config import Config
from jaxserve.engine import Engine, ServedModel
from jaxserve.errors import CheckpointError, EngineDeadError
from jaxserve.metrics import Metrics
from jaxserve.request import ChatPrompt, GenerationRequest
from tests.engines import build_engine
from tests.fakes import EOS_ID, say

ANSWER = "héllo\n"
TEMPLATE = "{% for m in messages %}{{ m.content }}!{% endfor %}"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Config, GenerationRequest | None]]:
    """Has the commands load a fake engine that always answers the same; returns what was asked."""
    calls: list[tuple[str, Config, GenerationRequest | None]] = []

    def load_engine(
        name: str,
        config: Config,
        *,
        progress: object = None,
        only_for: Callable[[ServedModel], GenerationRequest] | None = None,
        metrics: Metrics | None = None,
    ) -> Engine:
        engine, _ = build_engine(
            script=say({None: [*ANSWER.encode(), EOS_ID]}), chat_template=TEMPLATE, metrics=metrics
        )
        calls.append((name, config, only_for and only_for(engine.model)))
        return engine

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    return calls


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("jaxserve: error: ")
    return last


def test_text_goes_to_stdout_and_all_else_to_stderr(
    loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ANSWER
    assert "2 + 8 tokens" in captured.err
    assert "eos" in captured.err


def test_an_output_without_a_newline_gets_one(
    loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Hi", "--max-tokens", "1", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("h\n", "")


def test_json_is_one_line_with_all_of_it(
    loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Hi", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert list(result) == ["text", "token_ids", "finish_reason", "usage", "timings"]
    assert result["text"] == ANSWER
    assert result["token_ids"] == [*ANSWER.encode(), EOS_ID]
    assert result["finish_reason"] == "eos"
    assert result["usage"]["prompt_tokens"] == 2
    assert result["usage"]["completion_tokens"] == 8
    assert {"load_s", "queue_s", "prefill_s", "time_to_first_token_s", "decode_s"} <= set(
        result["timings"]
    )


def test_the_default_is_the_demo_model_decoded_greedily(loaded: list[Any]) -> None:
    main(["generate", "--prompt", "Hi"])
    name, config, request = loaded[0]
    assert name == "smollm2-135m-instruct"
    assert config == Config()
    assert request.prompt == "Hi"
    assert request.sampling.temperature == 0.0
    assert request.sampling.max_tokens is None


def test_options_reach_the_request_and_the_configuration(loaded: list[Any], tmp_path: Path) -> None:
    config_path = tmp_path / "mine.toml"
    config_path.write_text("[model]\ndtype = 'bfloat16'\n[kv]\npage_size = 8\n")
    words = "generate m.gguf --token-ids 1,2 --max-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.6"
    words += " --min-p 0.1 --seed 18446744073709551615 --stop a --stop b --dtype float32"
    assert main([*words.split(), "--config", str(config_path), "--ignore-eos"]) == 0
    name, config, request = loaded[0]
    assert (name, config.model.dtype, config.kv.page_size) == ("m.gguf", "float32", 8)
    assert request.prompt == (1, 2)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (3, 0.5, 4)
    assert (sampling.top_p, sampling.min_p, sampling.seed) == (0.6, 0.1, 2**64 - 1)
    assert (sampling.stop_strings, sampling.ignore_eos) == (("a", "b"), True)


def test_chat_makes_a_conversation_of_the_prompt(loaded: list[Any]) -> None:
    assert main(["generate", "--chat", "--prompt", "Hi"]) == 0
    prompt = loaded[0][2].prompt
    assert isinstance(prompt, ChatPrompt)
    assert [(message.role, message.content) for message in prompt.messages] == [("user", "Hi")]


def test_a_prompt_file_is_read_as_it_is(loaded: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    for mark in ("", "\ufeff"):  # but for a byte order mark
        path.write_bytes(f"{mark}é\r\n".encode())
        assert main(["generate", "--prompt-file", str(path)]) == 0
        assert loaded[-1][2].prompt == "é\r\n"


def test_a_prompt_file_that_cannot_be_read_is_named(
    loaded: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt-file", str(tmp_path / "none")]) == 1
    assert "none: No such file" in error_of(capsys)
    (tmp_path / "latin").write_bytes(b"a\xe9")
    assert main(["generate", "--prompt-file", str(tmp_path / "latin")]) == 1
    assert "latin is not UTF-8 at byte 1" in error_of(capsys)
    assert loaded == []


def test_a_request_that_cannot_be_is_one_line_and_exit_code_1(
    loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "Hi", "--max-tokens", "4000"]) == 1
    assert "max_tokens is 4000" in error_of(capsys)


def test_a_wrong_configuration_is_exit_code_2(
    loaded: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[kv]\npagesize = 8\n")
    assert main(["generate", "--prompt", "Hi", "--config", str(path)]) == 2
    assert "did you mean kv.page_size?" in error_of(capsys)
    assert main(["generate", "--chat", "--token-ids", "1"]) == 2
    assert "--chat needs a prompt of text" in error_of(capsys)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("x.gguf is\ncut short"), 1),
        (EngineDeadError("the engine failed"), 70),
        (MemoryError("Unable to allocate 7 GiB"), 1),
    ],
)
def test_an_error_of_loading_has_its_exit_code(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load_engine(*_: object, **__: object) -> Engine:
        raise error

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    assert main(["generate", "--prompt", "Hi"]) == code
    assert " ".join(str(error).split()) in error_of(capsys)


def test_a_name_in_a_file_cannot_command_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_engine(*_: object, **__: object) -> Engine:
        raise CheckpointError("unexpected: \x1b[2Jblk\x9b.0")

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    assert main(["generate", "--prompt", "Hi"]) == 1
    assert "unexpected: �[2Jblk�.0" in error_of(capsys)


def test_an_interrupt_is_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load_engine(*_: object, **__: object) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setattr(jaxserve.engine.start, "load_engine", load_engine)
    assert main(["generate", "--prompt", "Hi"]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("returned", "code"), [(0, 0), (1, 70)])
def test_serve_passes_its_options_on_and_says_how_it_ended(
    returned: int, code: int, loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Config] = []

    def serve(
        load_engine: Callable[[], Engine],
        config: Config,
        metrics: Metrics,
        *,
        read_config: Callable[[], Config],
    ) -> int:
        load_engine()
        served.append(config)
        assert read_config() == config
        return returned

    monkeypatch.setattr(jaxserve.server.lifecycle, "serve", serve)
    words = "serve m.gguf --host 0.0.0.0 --port 0 --dtype float32"
    assert main(words.split()) == code
    (config,) = served
    assert (config.server.host, config.server.port, config.model.dtype) == ("0.0.0.0", 0, "float32")
    assert loaded[0][:2] == ("m.gguf", config)
    assert loaded[0][2] is None, "a server compiles for any request"


def test_a_server_reads_its_configuration_again_and_leaves_the_log_alone(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[tenants.default]\nrequests_per_minute = 1\n")
    rates: list[int | None] = []

    def serve(*args: object, read_config: Callable[[], Config]) -> int:
        logging.getLogger("jaxserve").setLevel("DEBUG")  # an administrator
        rates.append(read_config().tenants.default.requests_per_minute)
        path.write_text("[tenants.default]\nrequests_per_minute = 2\n[measure]\nphases = true\n")
        again = read_config()
        rates.append(again.tenants.default.requests_per_minute)
        assert again.measure == args[1].measure  # type: ignore[attr-defined]
        assert logging.getLogger("jaxserve").level == logging.DEBUG
        return 0

    monkeypatch.setattr(jaxserve.server.lifecycle, "serve", serve)
    trace = tmp_path / "trace.json"
    assert main(["serve", "m.gguf", "--config", str(path), "--trace-file", str(trace)]) == 0
    assert rates == [1, 2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate", "one of the arguments --prompt --prompt-file --token-ids is required"),
        ("generate --prompt a --token-ids 1", "not allowed with"),
        ("generate --token-ids 1,x --json", "'1,x' is not a list of ids"),
        ("generate --prompt a --dtype int8", "invalid choice: 'int8'"),
        ("generate --prom a", "has no option --prom; did you mean --prompt?"),
        ("generate --promt a", "has no option --promt; did you mean --prompt?"),
        ("generate --prompt a --max-token=5", "has no option --max-token; did you mean --max-to"),
        ("generate --prompt a --zzz", "jaxserve generate has no option --zzz; see"),
        ("generate --prompt a m extra", "unrecognized arguments: extra"),
        ("config shw", "invalid choice: 'shw'; did you mean show?"),
        ("generte --prompt a", "invalid choice: 'generte'; did you mean generate?"),
        ("xyz", "invalid choice: 'xyz'; choose from generate, chat"),
        ("serve --port x", "invalid int value: 'x'"),
        ("", "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxserve: error: ")
    assert line.endswith(" --help`")
    assert said in line


def test_what_stands_behind_two_dashes_or_an_equals_sign_is_no_option() -> None:
    parser = build_parser()
    assert parser.parse_args(["generate", "--prompt=--promt"]).prompt == "--promt"
    assert parser.parse_args(["generate", "--prompt", "-- a b"]).prompt == "-- a b"
    assert parser.parse_args(["generate", "--prompt", "a", "--", "--m"]).model == "--m"


@pytest.mark.parametrize(
    "words", ["--help", "generate --help", "chat --help", "batch --help", "serve --help"]
)
def test_help_shows_an_example(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words.split())
    assert caught.value.code == 0
    assert (
        f"\n  jaxserve {words.split()[0].replace('--help', 'generate')}" in capsys.readouterr().out
    )


def test_version_names_what_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"jaxserve {jaxserve.__version__} (jax 0.")


FAKE_RUN = """\
import sys, json; sys.argv = ["jaxserve", "generate", "--prompt", "x"]
from jaxserve.cli import main, generate
def run(options):
    generate.write_text("h\\u00e9\\u4e16\\n" + (sys.stdin.read() and ""))
    print("done", file=sys.stderr)
    return 0
generate.run = run; sys.exit(main.main())
"""


@pytest.mark.parametrize(
    ("redirect", "code", "out", "err"),
    [
        ("", 0, "hé?\n", "done\n"),
        (
            "> /dev/full",
            1,
            "",
            "jaxserve: error: cannot write the output: No space left on device\n",
        ),
        (">&-", 0, "", "done\n"),
        ("2>&-", 0, "hé?\n", ""),
        ("<&-", 0, "hé?\n", "done\n"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_stream_that_cannot_take_it_is_no_internal_error(
    redirect: str, code: int, out: str, err: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, FAKE_RUN],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stdout.decode("latin-1")) == (code, out)
    assert done.stderr.decode() == err


def test_json_is_ascii_where_the_output_is_not_utf8(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="latin-1"))
    assert main(["generate", "--prompt", "Hi", "--json"]) == 0
    assert json.loads(buffer.getvalue().decode("ascii"))["text"] == ANSWER


def test_an_error_nobody_foresaw_is_exit_code_70_after_its_traceback() -> None:
    code = (
        "import sys; sys.argv = ['jaxserve', 'serve']; from jaxserve.cli import main, serve\n"
        "def run(options): raise ZeroDivisionError('planted')\n"
        "serve.run = run; sys.exit(main.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("jaxserve: internal error: ZeroDivisionError: planted\n")
