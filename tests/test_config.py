"""The configuration: layers of sources, errors that say where and what, and the shipped files."""

import re
import tomllib
from pathlib import Path

import pydantic
import pytest

from jaxserve.config import Config, default_cache_dir, is_loopback, load_config
from jaxserve.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def message(path: Path | None = None, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags={key.replace("__", "."): value for key, value in flags.items()})
    text = str(caught.value)
    assert "\n" not in text, "an error is one line"
    return text


def test_the_defaults_equal_cpu_toml() -> None:
    assert load_config(CONFIGS / "cpu.toml") == Config() == load_config()


def test_cpu_toml_names_every_key_that_has_a_default() -> None:
    written = tomllib.loads((CONFIGS / "cpu.toml").read_text())
    defaults = Config().model_dump(exclude_none=True)
    assert {name: set(keys) for name, keys in written.items()} == {
        name: set(keys) for name, keys in defaults.items()
    }


def test_the_baseline_is_plain() -> None:
    config = load_config(CONFIGS / "baseline.toml")
    assert (config.model.dtype, config.model.max_model_tokens) == ("float32", 1024)
    assert (config.scheduler.batching, config.scheduler.chunked_prefill) == ("continuous", False)
    assert (config.scheduler.max_seqs, config.buckets.decode_seqs) == (8, (8,))
    assert config.buckets.chunk_tokens[-1] == config.model.max_model_tokens
    assert (config.buckets.capture, config.runner.overlap) == (False, False)
    assert config.kv.reserve == "on_demand"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_every_number_in_a_shipped_file_says_where_it_comes_from(path: Path) -> None:
    for line in path.read_text().splitlines():
        key, _, value = line.partition("=")
        if value and not key.startswith("#") and re.search(r"\d", value.partition("#")[0]):
            assert len(value.partition("#")[2].split()) >= 3, line


def test_later_sources_win_over_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[server]\nport = 1\nhost = 'a'\n[scheduler]\nmax_seqs = 3\n")
    monkeypatch.setenv("JAXSERVE_SERVER__PORT", "2")
    monkeypatch.setenv("JAXSERVE_SERVER__HOST", "b")
    config = load_config(path, flags={"server.port": 3, "server.host": None})
    assert (config.server.port, config.server.host, config.scheduler.max_seqs) == (3, "b", 3)
    assert config.server.drain_timeout_s == Config().server.drain_timeout_s


def test_the_environment_takes_lists_as_json_and_empty_as_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXSERVE_BUCKETS__DECODE_SEQS", "[2, 6]")
    monkeypatch.setenv("JAXSERVE_RUNNER__OVERLAP", "false")
    monkeypatch.setenv("JAXSERVE_MODEL__DTYPE", "")
    config = load_config()
    assert config.buckets.decode_seqs == (2, 6)
    assert not config.runner.overlap
    assert config.model.dtype == "auto"


def test_an_unknown_key_in_the_file_gets_a_did_you_mean(tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nmax_sequences = 3\n")
    text = message(path)
    assert text.startswith(f"{path}: unknown key scheduler.max_sequences")
    assert "did you mean scheduler.max_seqs?" in text


def test_a_known_key_in_the_wrong_section_is_sent_to_the_right_one(tmp_path: Path) -> None:
    path = write(tmp_path, "[model]\npage_size = 3\n")
    assert "did you mean kv.page_size?" in message(path)


def test_an_unknown_section_gets_a_did_you_mean(tmp_path: Path) -> None:
    path = write(tmp_path, "[schedular]\nmax_seqs = 3\n")
    assert "unknown section schedular; did you mean scheduler?" in message(path)


def test_a_section_that_is_no_table_is_refused(tmp_path: Path) -> None:
    assert "model is 'llama', but must be a table" in message(write(tmp_path, "model = 'llama'"))


def test_an_unknown_flag_gets_a_did_you_mean() -> None:
    assert "flags: unknown key runner.overlapp; did you mean runner.overlap?" in message(
        runner__overlapp=True
    )


def test_an_unknown_variable_gets_a_did_you_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_MODEL__DTYP", "float32")
    text = message()
    assert "unknown variable JAXSERVE_MODEL__DTYP" in text
    assert "did you mean JAXSERVE_MODEL__DTYPE?" in text


def test_a_whole_section_in_one_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_MODEL", '{"dtype": "float32"}')
    assert "unknown variable JAXSERVE_MODEL" in message()


@pytest.mark.parametrize("value", ["3", '"x"', "null", "[1]", '{"page_size": 8}'])
def test_a_section_in_one_variable_is_one_problem_whatever_it_says(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_KV", value)
    with pytest.raises(ConfigError, match=r"unknown variable JAXSERVE_KV; `jaxserve config show`"):
        load_config()


def test_a_misspelt_variable_is_told_once_and_its_prefix_is_near_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXSERVE_KV__PAGESIZE", "8")
    with pytest.raises(ConfigError, match=r"did you mean JAXSERVE_KV__PAGE_SIZE\?$"):
        load_config()
    monkeypatch.delenv("JAXSERVE_KV__PAGESIZE")
    monkeypatch.setenv("JAXSERVE_FOO", "8")
    with pytest.raises(ConfigError, match=r"JAXSERVE_FOO; `jaxserve config show` lists the keys$"):
        load_config()


@pytest.mark.parametrize("key", ["server.port", "kv.num_pages", "log.interval_s", "kv.dtype"])
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_truth_value_is_no_number(key: str, value: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    file = tmp_path / "a.toml"
    file.write_text(f"[{section}]\n{name} = {value}\n")
    with pytest.raises(ConfigError, match=f"{key} is {value.title()}, but true and false"):
        load_config(file)


def test_a_file_of_windows_may_begin_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[kv]\r\npage_size = 8\r\n")
    assert load_config(file).kv.page_size == 8


@pytest.mark.parametrize("sizes", [{"frst": 1, "last": 4, "ratio": 2}, {}, {"first": 1}])
def test_a_geometric_list_says_what_it_needs(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a geometric list has the integers first, last and"):
        load_config(flags={"buckets.decode_seqs": sizes})


def test_a_list_that_is_not_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_BUCKETS__DECODE_SEQS", "2,4")
    text = message()
    assert text.startswith("environment: JAXSERVE_BUCKETS__DECODE_SEQS='2,4': not JSON; lists and")


def test_a_wrong_value_names_file_key_value_and_what_is_allowed(tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nmax_seqs = 0\n")
    text = message(path)
    assert text.startswith(f"{path}: scheduler.max_seqs is 0, but ")
    assert "greater than or equal to 1" in text


def test_a_wrong_value_is_blamed_on_the_source_that_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "[model]\ndtype = 'float32'\n")
    monkeypatch.setenv("JAXSERVE_MODEL__DTYPE", "float16")
    text = message(path)
    assert text.startswith("environment: model.dtype is 'float16', but ")
    assert "'auto', 'float32' or 'bfloat16'" in text


def test_keys_that_contradict_each_other_are_told_with_their_source(tmp_path: Path) -> None:
    path = write(tmp_path, "[measure]\ntrace_steps = 5\n")
    text = message(path, measure__phases=False)
    assert text == "flags: measure.trace_steps needs phases = true; or set trace_steps = 0"


def test_an_endless_limit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "[limits]\nqueue_timeout_s = inf\n")
    assert "limits.queue_timeout_s is inf, but input should be a finite number" in message(path)


def test_a_list_that_does_not_rise_is_refused() -> None:
    assert "flags: buckets.decode_seqs is [8, 2], but must be a rising list" in message(
        buckets__decode_seqs=[8, 2]
    )


def test_a_missing_file_and_a_broken_one_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "none.toml"
    assert f"{missing} cannot be read: No such file" in message(missing)
    assert "is not valid TOML" in message(write(tmp_path, "[model\n"))


def test_nothing_changes_a_configuration_later() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        Config().server.port = 1  # type: ignore[misc]  # the point of the test


def test_the_cache_folder_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "jaxserve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir().is_relative_to(tmp_path / "home")


def test_tenants_are_tables_in_a_file_and_json_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path,
        "[tenants.default]\nrequests_per_minute = 60\n"
        "[tenants.named.acme]\ntokens_per_minute = 5\nmax_priority = -1\n",
    )
    tenants = load_config(path).tenants
    assert tenants.limits_of("acme").tokens_per_minute == 5
    assert tenants.limits_of("acme").requests_per_minute is None, "nothing comes from default"
    assert tenants.limits_of("bolt").requests_per_minute == 60
    monkeypatch.setenv("JAXSERVE_TENANTS__DEFAULT", '{"queue_share": 0.5}')
    named = {"tenants.named": '{"bolt": {"max_context_tokens": 9}}'}
    tenants = load_config(path, flags=named).tenants
    assert tenants.default.queue_share == 0.5
    assert tenants.limits_of("bolt").max_context_tokens == 9


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[tenants.named.acme]\nqueue_shar = 1", "unknown key tenants.named.acme.queue_shar; did"),
        ("[tenants.default]\nqueue_share = 0", "tenants.default.queue_share is 0, but"),
        ("[tenants.named.'a b']", "the tenant 'a b' must be"),
        ("[tenants.named.other]", "other is a word of the metrics"),
        ("[tenants.named]\nacme = 3", "tenants.named.acme is 3, but"),
        ("[tls]\ncert_file = 'x'", "tls.cert_file and key_file go together"),
        ("[tls]\nclient_ca_file = 'x'", "tls.client_ca_file needs cert_file"),
        ("[admin]\naddress = '0.0.0.0:1'", "admin.address is '0.0.0.0:1', but it must be unix:"),
        ("[admin]\naddress = '127.0.0.1'", "but it must be unix:"),
        ("[admin]\naddress = '127.0.0.1:65536'", "but it must be unix:"),
        ("[admin]\naddress = 'unix:'", "but it must be unix:"),
    ],
)
def test_what_is_wrong_with_tenants_and_listeners_is_named(
    tmp_path: Path, text: str, what: str
) -> None:
    assert what in message(write(tmp_path, text))


@pytest.mark.parametrize(
    "address", ["unix:/run/x.sock", "127.0.0.1:0", "[::1]:50052", "localhost:1"]
)
def test_an_admin_address_is_a_socket_or_a_loopback_port(tmp_path: Path, address: str) -> None:
    assert load_config(write(tmp_path, f"[admin]\naddress = '{address}'")).admin.address == address


def test_only_what_is_certainly_this_machine_is_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert is_loopback(host), host
    for host in ("0.0.0.0", "::", "", "10.0.0.1", "localhost.example.org", "::ffff:8.8.8.8"):
        assert not is_loopback(host), host
