"""Keys, tenants and certificates are read again together, or not at all."""

import asyncio
import logging
from pathlib import Path

import pytest

from jaxserve.config import (
    AuthSection,
    Config,
    SchedulerSection,
    TenantLimits,
    TenantsSection,
)
from jaxserve.errors import ConfigError, UnauthenticatedError
from jaxserve.metrics import Metrics
from jaxserve.server.credentials import Credentials, Reloaded
from tests.server.credentials import Files, add_line, sections, write_keys
from tests.server.harness import until


def build(config: Config, **options: object) -> Credentials:
    return Credentials(config, Metrics(), **options)  # type: ignore[arg-type]


def allows(credentials: Credentials, key: str) -> bool:
    try:
        credentials.authenticator.authenticate(f"Bearer {key}")
    except UnauthenticatedError:
        return False
    return True


def test_a_reload_takes_new_keys_and_drops_old_ones(tmp_path: Path) -> None:
    path, (old,) = write_keys(tmp_path, "acme")
    credentials = build(Config(auth=AuthSection(keys_file=path)))
    path.unlink()
    _, new = write_keys(tmp_path, "bolt", "coil")
    assert allows(credentials, old)
    assert credentials.reload() == Reloaded(num_keys=2, num_tenants=2)
    assert not allows(credentials, old)
    assert all(allows(credentials, key) for key in new)


def test_one_thing_that_is_wrong_leaves_all_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(folder=tmp_path)
    path, (old,) = write_keys(tmp_path, "acme")
    limits = TenantsSection(default=TenantLimits(requests_per_minute=1))
    config = Config.model_validate(sections(path, files.section()))
    credentials = build(config, read_config=lambda: config.model_copy(update={"tenants": limits}))
    told: list[TenantsSection] = []
    credentials.add_listener(told.append)
    assert credentials.certificates is not None
    before = credentials.certificates.expires, credentials.certificates._current
    _, (new,) = write_keys(tmp_path, "acme")
    files.write(files.expired())  # the keys are right, the certificate is not
    with pytest.raises(ConfigError, match="expired"):
        credentials.reload()
    assert allows(credentials, old)
    assert not allows(credentials, new)
    assert told == [TenantsSection()]
    files.write(files.root.issue_cert("localhost"))
    add_line(path, tenant="acme")  # now it is the other way round
    with pytest.raises(ConfigError, match="line 4: sha256"):
        credentials.reload()
    assert (credentials.certificates.expires, credentials.certificates._current) == before
    assert "credentials stay as they were" in caplog.text
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    credentials.reload()
    assert allows(credentials, new)
    assert told == [TenantsSection(), limits]
    assert credentials.certificates._current is not before[1]


def test_tenants_come_anew_and_what_needs_a_restart_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = TenantsSection(default=TenantLimits(requests_per_minute=1))
    changed = Config(tenants=limits, scheduler=SchedulerSection(max_seqs=3))
    credentials = build(Config(), read_config=lambda: changed)
    credentials.reload()
    assert credentials.tenants == limits
    assert "a restart is needed for what changed sections=scheduler" in caplog.text


def test_a_configuration_that_has_become_wrong_changes_nothing() -> None:
    def read_config() -> Config:
        raise ConfigError("mine.toml: unknown key")

    credentials = build(Config(), read_config=read_config)
    with pytest.raises(ConfigError, match="unknown key"):
        credentials.reload()
    assert credentials.tenants == TenantsSection()


def test_only_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path, (key,) = write_keys(tmp_path, "acme")
    credentials = build(Config(auth=AuthSection(keys_file=path)))
    assert not credentials.reload_if_changed()
    add_line(path, tenant="acme")
    assert credentials.reload_if_changed()  # it is wrong, and in the log
    assert not credentials.reload_if_changed(), "once is enough"
    assert allows(credentials, key)
    path.unlink()
    assert credentials.reload_if_changed()
    _, (new,) = write_keys(tmp_path, "acme")
    assert credentials.reload_if_changed()
    assert allows(credentials, new)


@pytest.mark.asyncio
async def test_files_are_looked_at_while_the_server_runs(tmp_path: Path) -> None:
    path, _ = write_keys(tmp_path, "acme")
    auth = AuthSection(keys_file=path, reload_interval_s=0.001)
    credentials = build(Config(auth=auth))
    watch = asyncio.create_task(credentials.watch())
    _, (new,) = write_keys(tmp_path, "bolt")
    await until(lambda: allows(credentials, new))
    watch.cancel()


@pytest.mark.asyncio
async def test_there_is_no_watch_where_there_is_nothing_to_see(tmp_path: Path) -> None:
    await build(Config()).watch()
    path, _ = write_keys(tmp_path, "acme")
    await build(Config(auth=AuthSection(keys_file=path, reload_interval_s=0))).watch()


def test_a_keys_file_that_is_wrong_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        build(Config(auth=AuthSection(keys_file=tmp_path / "none")))


def test_a_file_without_keys_and_one_that_others_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text("# none yet\n")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        build(Config(auth=AuthSection(keys_file=path)))
    assert "no keys: every call is refused" in caplog.text
    assert "can be read by others" in caplog.text
