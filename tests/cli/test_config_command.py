"""`jaxserve config`: what is shown is what holds, and all that is wrong with a file is said."""

import json
import logging
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.config import _toml_value, schema_text
from jaxserve.cli.main import main
from jaxserve.config import Config, TenantLimits, load_config
from jaxserve.config.load import env_name, known_keys, section_type

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """`main` sets it, for a process of its own."""
    logger = logging.getLogger("jaxserve")
    before = logger.level
    yield
    logger.setLevel(before)


GEOMETRIC = '{"first": 8, "last": 32, "ratio": 2}'
FREE = '{"queue_share": 1.0}'
OPEN = dict.fromkeys(TenantLimits.model_fields) | {"queue_share": 1.0, "weight": 1.0}
VALUES: dict[str, tuple[str, object]] = {
    "admin.address": ("unix:/a", "unix:/a"),
    "limits.max_header_bytes": ("20000", 20000),
    "prefix_cache.shared_namespaces": ('{"team": ["a", "b"]}', {"team": ["a", "b"]}),
    "sampling.frequency_penalty": ("-0.5", -0.5),
    "sampling.min_p": ("0.25", 0.25),
    "sampling.presence_penalty": ("0.5", 0.5),
    "sampling.top_p": ("0.75", 0.75),
    "server.http_allowed_hosts": ('["a.example"]', ["a.example"]),
    "server.http_cors_origins": ('["http://a.example"]', ["http://a.example"]),
    "tenants.default": ('{"max_priority": 7}', OPEN | {"max_priority": 7}),
    "tenants.named": (f'{{"acme": {FREE}}}', {"acme": OPEN}),
    "tracing.endpoint": ("http://a.example:4317", "http://a.example:4317"),
    "tracing.sample_ratio": ("0.25", 0.25),
}
# Keys that a key needs beside it in the file.
BESIDE = {
    "tls.cert_file": "key_file = 'k'",
    "tls.key_file": "cert_file = 'c'",
    "tls.client_ca_file": "cert_file = 'c'\nkey_file = 'k'",
}


def other_value(key: str) -> tuple[str, object]:
    """A value of the key that is not its default: as a variable or a flag says it, and itself."""
    if key in VALUES:
        return VALUES[key]
    section, _, name = key.partition(".")
    field = section_type(Config.model_fields[section]).model_fields[name]
    default = field.default
    if typing.get_origin(field.annotation) is typing.Literal:
        word = next(word for word in typing.get_args(field.annotation) if word != default)
        return word, word
    if field.annotation in (str, Path | None):
        return "/a b", "/a b"
    match default:
        case tuple():
            return GEOMETRIC, [8, 16, 32]
        case bool():
            return str(not default).lower(), not default
        case float():
            return "7.5", 7.5
        case _:
            return "7", 7


def shown(
    capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, dict[str, dict[str, object]]]:
    assert main(["config", "show", "--json", *words]) == 0
    values: dict[str, dict[str, dict[str, object]]] = json.loads(capsys.readouterr().out)
    return values


@pytest.mark.parametrize("key", known_keys())
def test_each_key_has_a_variable_over_the_file_and_a_flag_over_both(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section, _, name = key.partition(".")
    default = Config().model_dump(mode="json")[section][name]
    said, value = other_value(key)
    path = tmp_path / "mine.toml"
    text = json.dumps(value) if default is None else json.dumps(default)
    in_toml = _toml_value(value if default is None else default)
    path.write_text(f"[{section}]\n{name} = {in_toml}\n{BESIDE.get(key, '')}\n")
    before = json.loads(text)

    assert shown(capsys)[section][name] == {"value": default, "source": "default", "from": None}
    from_file = {"value": before, "source": "file", "from": str(path)}
    assert shown(capsys, "--config", str(path))[section][name] == from_file
    monkeypatch.setenv(env_name(key), said)
    from_environment = {"value": value, "source": "environment", "from": env_name(key)}
    assert shown(capsys, "--config", str(path))[section][name] == from_environment
    monkeypatch.setenv(env_name(key), before if isinstance(before, str) else text)
    words = ("--config", str(path), "--set", f"{key}={said}")
    from_flag = {"value": value, "source": "flag", "from": None}
    assert shown(capsys, *words)[section][name] == from_flag


def test_what_is_shown_is_a_file_that_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSERVE_SERVER__PORT", "7")
    monkeypatch.setenv("JAXSERVE_RUNNER__CACHE_DIR", 'a "b"\\c')
    baseline = CONFIGS / "baseline.toml"
    assert main(["config", "show", "--config", str(baseline), "--set", "kv.page_size=8"]) == 0
    text = capsys.readouterr().out
    lines = {line.split(" = ")[0]: line.split("  # ")[-1] for line in text.splitlines()}
    assert lines["port"] == "JAXSERVE_SERVER__PORT"
    assert lines["page_size"] == "flag"
    assert lines["capture"] == str(baseline)
    assert lines["max_chunks"] == "default"
    assert "# num_pages is unset " in text
    monkeypatch.delenv("JAXSERVE_SERVER__PORT")
    monkeypatch.delenv("JAXSERVE_RUNNER__CACHE_DIR")
    (tmp_path / "shown.toml").write_text(text)
    again = load_config(tmp_path / "shown.toml")
    assert (again.server.port, str(again.runner.cache_dir)) == (7, 'a "b"\\c')
    assert (again.kv.page_size, again.scheduler.max_seqs, again.buckets.capture) == (8, 8, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--set kv.pagesize=8", "flags: unknown key kv.pagesize; did you mean kv.page_size?"),
        ("--set schedular.max_seqs=8", "unknown section schedular; did you mean scheduler?"),
        ("--set kv.page_size=0", "flags: kv.page_size is '0', but input should be greater"),
        ("--set buckets.decode_seqs=2,4", "buckets.decode_seqs='2,4': not JSON"),
        ("--set page_size=8", "--set 'page_size=8' is not SECTION.KEY=VALUE"),
        ("--set kv.page_size", "is not SECTION.KEY=VALUE"),
        ("--set kv.page_size=", "is not SECTION.KEY=VALUE"),
    ],
)
def test_a_flag_that_is_wrong_is_one_line_and_exit_code_2(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("jaxserve: error: ")
    assert said in line


def test_two_flags_for_one_key_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "1", "--set", "server.port=2"]) == 2
    assert "--port and --set server.port set the same key" in capsys.readouterr().err


def test_check_lists_every_problem_of_every_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXSERVE_NO__SUCH", "1")  # another source, no business of the file
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(
        "[kv]\npagesize = 3\npage_size = 0\n[model]\ndtype = 'int8'\n[oops]\na = 1\n"
        "[buckets]\ndecode_seqs = {first = 4, last = 2, ratio = 2}\n"
    )
    broken = tmp_path / "broken.toml"
    broken.write_text("[kv\n")
    good = CONFIGS / "cpu.toml"
    files = [str(wrong), str(good), str(broken), str(tmp_path / "none.toml")]
    assert main(["config", "check", *files]) == 2
    captured = capsys.readouterr()
    assert captured.out == f"{good}: OK\n"
    lines = captured.err.splitlines()
    assert len(lines) == 7
    for said in (
        "unknown key kv.pagesize; did you mean kv.page_size?",
        "unknown section oops",
        "kv.page_size is 0, but",
        "model.dtype is 'int8', but",
        "a geometric list needs",
        "broken.toml is not valid TOML",
        "none.toml cannot be read: No such file",
    ):
        assert len([line for line in lines if said in line]) == 1, said
    assert all(line.startswith("jaxserve: error: ") for line in lines)


def test_check_names_mechanisms_that_do_not_go_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jaxserve.cli.config.find_conflicts", lambda config: ["a and b", "a and c"])
    path = str(CONFIGS / "cpu.toml")
    assert main(["config", "check", path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"jaxserve: error: {path}: a and b",
        f"jaxserve: error: {path}: a and c",
    ]


def test_the_committed_schema_is_fresh() -> None:
    assert (CONFIGS / "schema.json").read_text() == f"{schema_text()}\n", (
        "run: jaxserve config schema > configs/schema.json"
    )


def test_the_schema_knows_every_key_and_no_other() -> None:
    schema = json.loads(schema_text())
    sections = {
        name: schema["$defs"][reference["$ref"].rpartition("/")[2]]
        for name, reference in schema["properties"].items()
    }
    keys = [f"{name}.{key}" for name, section in sections.items() for key in section["properties"]]
    assert keys == known_keys()
    assert not any(part["additionalProperties"] for part in (schema, *sections.values()))
    described = [key for section in sections.values() for key in section["properties"].values()]
    assert all(key["description"] for key in described)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_shipped_file_names_its_schema(path: Path) -> None:
    assert path.read_text().startswith("#:schema schema.json\n")
    assert tomllib.loads(path.read_text()).keys() <= json.loads(schema_text())["properties"].keys()
