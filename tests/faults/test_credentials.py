"""A real server with keys, certificates and an administrator, from its start to its drain."""

import json
import signal
import tempfile
from pathlib import Path

import grpc
import pytest
import trustme

from jaxserve.cli import exit_codes
from jaxserve.client import Client, ServerError, Tls, UnauthenticatedError
from jaxserve.gen import admin_pb2, admin_pb2_grpc
from tests.faults.processes import EXIT_S, Place, ServerProcess, run_command
from tests.server.credentials import HOST, Files


def new_key(path: Path, tenant: str) -> str:
    done = run_command("keys", "new", "--file", str(path), "--tenant", tenant)
    assert (done.code, done.err) == (exit_codes.OK, "")
    return done.out.decode().strip()


def wait_for(server: ServerProcess, text: str) -> None:
    server._find(f"({text})")


def test_keys_certificates_and_limits_change_under_a_running_server(
    place: Place, tmp_path: Path
) -> None:
    files, keys = Files(folder=tmp_path), tmp_path / "keys.jsonl"
    old, kept = new_key(keys, "acme"), new_key(keys, "bolt")
    config = tmp_path / "mine.toml"
    config.write_text(place.config.read_text())
    with tempfile.TemporaryDirectory(prefix="adm") as folder:
        admin = f"unix:{folder}/s"
        words = [str(place.model), "--config", str(config), *place.cache_option]
        for key, value in (
            ("auth.keys_file", keys),
            ("auth.reload_interval_s", 0),
            ("tls.cert_file", files.folder / "cert.pem"),
            ("tls.key_file", files.folder / "key.pem"),
            ("admin.address", admin),
        ):
            words += ["--set", f"{key}={value}"]
        server = ServerProcess(words)
        try:
            check_changes(server, files, admin=admin, config=config, old=old, kept=kept)
            assert server.wait() == exit_codes.OK
        finally:
            server.close()
        assert not Path(admin.removeprefix("unix:")).exists()
    log = "\n".join(server.lines)
    key_lines = (tmp_path / "key.pem").read_text().splitlines()[1:-1]
    for secret in (old, kept, old[4:20], kept[4:20], *key_lines):
        assert secret not in log
    assert not [line for line in server.lines if " ERROR " in line]


def check_changes(
    server: ServerProcess, files: Files, *, admin: str, config: Path, old: str, kept: str
) -> None:
    def connect(key: str, trust: Tls) -> Client:
        return Client(server.target, key=key, tls=trust)

    before = files.trust()
    with connect(old, before) as ours, connect(kept, before) as theirs:
        ours.wait_ready(timeout_s=EXIT_S)
        for client in (ours, theirs):
            assert client.generate("Hi", max_tokens=2).usage.completion_tokens <= 2
        with connect("", before) as nobody, pytest.raises(UnauthenticatedError):
            nobody.generate("Hi", max_tokens=2)
        done = run_command("keys", "list", "--file", str(files.folder / "keys.jsonl"), "--json")
        first = json.loads(done.out)[0]["id"]
        run_command("keys", "revoke", "--file", str(files.folder / "keys.jsonl"), first)
        with config.open("a") as file:
            file.write("[tenants.named.bolt]\nrequests_per_minute = 1\n")
        files.root = trustme.CA()
        files.write(files.root.issue_cert(HOST))
        theirs.generate("Hi", max_tokens=2)  # nothing holds yet
        server.send(signal.SIGHUP)
        wait_for(server, "credentials read keys=1 tenants=1")
        with pytest.raises(UnauthenticatedError):
            ours.generate("Hi", max_tokens=2)
        theirs.generate("Hi", max_tokens=2)  # over the connection with the old certificate
        with pytest.raises(ServerError, match="requests_per_minute is used up") as caught:
            theirs.generate("Hi", max_tokens=2)
        assert caught.value.reason == "QUOTA_EXCEEDED"
    with connect(kept, files.trust()) as client:
        client.tokenize("Hi")
    with connect(kept, before) as client, pytest.raises(ServerError):
        client.tokenize("Hi", timeout_s=EXIT_S)
    with grpc.insecure_channel(admin) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        told = stub.GetServerInfo(admin_pb2.GetServerInfoRequest())
        assert (told.state, told.platform) == ("serving", "cpu")
        assert json.loads(told.config_json)["tenants"]["named"]["bolt"]["requests_per_minute"] == 1
        assert stub.ListBuckets(admin_pb2.ListBucketsRequest()).buckets
        assert stub.Drain(admin_pb2.DrainRequest()).in_flight == 0


def test_a_server_that_others_reach_and_that_asks_nobody_does_not_start() -> None:
    done = run_command("serve", "no/such/model", "--host", "0.0.0.0", "--port", "0")
    assert done.code == exit_codes.USAGE
    assert "server.host is '0.0.0.0', which others may reach" in done.error_line


def test_a_wrong_keys_file_is_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text('{"tenant": "acme"}\n')
    path.chmod(0o600)
    done = run_command("serve", "no/such/model", "--port", "0", "--set", f"auth.keys_file={path}")
    assert done.code == exit_codes.USAGE
    assert f"{path}, line 1: sha256: Field required" in done.error_line
