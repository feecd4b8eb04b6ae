"""Calls of `buf curl` and what they print: `scripts/judges/buf_curl`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import trustme

from scripts.judges.checks import Checks

GENERATE = "jaxserve.v1.GenerationService/Generate"
STREAM = "jaxserve.v1.GenerationService/StreamGenerate"
LIST_MODELS = "jaxserve.v1.ModelService/ListModels"
PROTOS = "protos"
ASKED: dict[str, Any] = {
    "text": "The capital of France is",
    "sampling": {"temperature": 0},
    "stop": {"maxTokens": 8},
}
# buf's exit code is the status, shifted by three bits
INVALID_ARGUMENT, UNIMPLEMENTED = 3 << 3, 12 << 3


class Buf:
    """Runs buf, with options that all its calls share."""

    def __init__(self, program: str, *options: str) -> None:
        self.program = program
        self._options = ("--protocol", "grpc", *options)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        line = [self.program, "curl", *self._options, *arguments]
        return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)

    def lines(self, *arguments: str) -> list[str]:
        done = self.run(*arguments)
        return done.stdout.split() if done.returncode == 0 else [done.stderr]

    def call(self, url: str, body: object, *arguments: str) -> Any:  # noqa: ANN401  # JSON
        """Returns the reply, or the list of a stream's."""
        done = self.run(*arguments, "-d", json.dumps(body), url)
        if done.returncode:
            return f"{done.returncode}: {done.stderr}"
        replies = json.loads("[" + done.stdout.replace("}\n{", "},{") + "]")
        return replies if "Stream" in url else replies[0]


def text_of(reply: Any) -> str:  # noqa: ANN401
    """Returns the first choice's text, of a reply or of a stream."""
    if isinstance(reply, list):
        return "".join(event.get("delta", {}).get("text", "") for event in reply)
    return str(reply["choices"][0]["text"]) if isinstance(reply, dict) else str(reply)


def judge_plain(checks: Checks, program: str, folder: Path, address: str) -> None:
    url = f"http://{address}"
    key = f"authorization: Bearer {os.environ['KEY']}"
    buf = Buf(program, "--http2-prior-knowledge", "--reflect-header", "*", "-H", key)
    services = buf.lines("--list-services", url)
    wanted = {"jaxserve.v1.GenerationService", "jaxserve.v1.ModelService", "grpc.health.v1.Health"}
    checks.holds("reflection: list services", wanted <= {*services}, services)
    checks.holds("reflection: no administrator here", "AdminService" not in str(services))
    methods = buf.lines("--list-methods", url)
    checks.holds("reflection: list methods", {GENERATE, STREAM, LIST_MODELS} <= {*methods}, methods)
    for version in ("v1", "v1alpha"):
        found = buf.lines("--reflect-protocol", f"grpc-{version}", "--list-methods", url)
        checks.same(f"reflection {version}: list methods", found, methods)
    models = buf.call(f"{url}/{LIST_MODELS}", {})
    checks.holds("reflection: unary", "models" in models, models)
    whole = buf.call(f"{url}/{GENERATE}", ASKED)
    checks.holds("reflection: Generate", "usage" in whole, whole)
    events = buf.call(f"{url}/{STREAM}", ASKED)
    kinds = [next(iter(event)) for event in events]
    checks.holds(
        "reflection: stream, from start to finish",
        kinds[0] == "start" and kinds[-1] == "finish" and {*kinds[1:-1]} == {"delta"},
        kinds,
    )
    checks.same("reflection: the stream's text", text_of(events), text_of(whole))
    chat = {"chat": {"messages": [{"role": "user", "content": "Hi!"}]}, "stop": {"maxTokens": 4}}
    replied = buf.call(f"{url}/{GENERATE}", chat)
    checks.holds("reflection: a conversation", text_of(replied), text_of(replied))
    judge_schemas(checks, Buf(program, "--http2-prior-knowledge", "-H", key), folder, url, whole)
    judge_refusals(checks, buf, Buf(program, "--http2-prior-knowledge"), url)
    admin = Buf(program, "--http2-prior-knowledge", "-H", key).run(
        "--schema", PROTOS, "-d", "{}", f"{url}/jaxserve.v1.AdminService/GetLoad"
    )
    checks.same("AdminService on the public port", admin.returncode, UNIMPLEMENTED)
    judge_admin(checks, Buf(program, "--http2-prior-knowledge"), folder)


def judge_schemas(checks: Checks, buf: Buf, folder: Path, url: str, whole: object) -> None:
    image = folder / "protos.binpb"
    subprocess.run([buf.program, "build", PROTOS, "-o", str(image)], check=True)
    for name, schema in (("protos", PROTOS), ("an image", str(image))):
        listed = buf.lines("--schema", schema, "--list-methods")
        checks.holds(f"schema of {name}: list methods", GENERATE in listed, listed)
        replied = buf.call(f"{url}/{GENERATE}", ASKED, "--schema", schema)
        checks.same(f"schema of {name}: Generate", text_of(replied), text_of(whole))
        events = buf.call(f"{url}/{STREAM}", ASKED, "--schema", schema)
        checks.same(f"schema of {name}: stream", text_of(events), text_of(whole))


def judge_refusals(checks: Checks, buf: Buf, keyless: Buf, url: str) -> None:
    wrong = json.dumps(ASKED | {"sampling": {"temperature": -1}})
    refused = buf.run("-d", wrong, f"{url}/{GENERATE}")
    checks.same("refused: its exit code", refused.returncode, INVALID_ARGUMENT)
    details = [detail["type"] for detail in json.loads(refused.stderr)["details"]]
    checks.same("refused: rich details", details, ["google.rpc.ErrorInfo", "google.rpc.BadRequest"])
    for name, arguments in (
        ("a call", ["--schema", PROTOS, "-d", wrong, f"{url}/{GENERATE}"]),
        ("reflection", ["--list-services", url]),
    ):
        refused = keyless.run(*arguments)
        unauthenticated = "authenticated" in refused.stderr.lower()
        checks.holds(
            f"without a key: {name}", refused.returncode and unauthenticated, refused.stderr
        )


def judge_admin(checks: Checks, buf: Buf, folder: Path) -> None:
    socket = ("--unix-socket", str(folder / "admin.sock"))
    base = "http://localhost"
    services = buf.lines(*socket, "--list-services", base)
    checks.holds("admin socket: list services", "jaxserve.v1.AdminService" in services, services)
    methods = buf.lines(*socket, "--list-methods", base)
    checks.holds("admin socket: list methods", "jaxserve.v1.AdminService/Drain" in methods, methods)
    for method in ("GetServerInfo", "GetLoad", "ListBuckets"):
        reply = buf.call(f"{base}/jaxserve.v1.AdminService/{method}", {}, *socket)
        checks.holds(f"admin socket: {method}", isinstance(reply, dict) and reply, reply)


def write_certificates(folder: Path) -> None:
    """Writes a server's certificate and a client's, each from a root of its own."""
    root, client_root = trustme.CA(), trustme.CA()
    root.cert_pem.write_to_path(folder / "root.pem")
    client_root.cert_pem.write_to_path(folder / "clients.pem")
    for name, leaf in (
        ("", root.issue_cert("localhost")),
        ("client_", client_root.issue_cert("client")),
    ):
        leaf.cert_chain_pems[0].write_to_path(folder / f"{name}cert.pem")
        key = folder / f"{name}key.pem"
        key.touch(mode=0o600)
        leaf.private_key_pem.write_to_path(key)


def judge_tls(checks: Checks, program: str, folder: Path, address: str) -> None:
    url = f"https://localhost:{address.rpartition(':')[2]}"
    trusting = ("--cacert", str(folder / "root.pem"))
    buf = Buf(program, *trusting)
    whole = buf.call(f"{url}/{GENERATE}", ASKED)
    checks.holds("TLS: Generate over reflection", "usage" in whole, text_of(whole))
    events = buf.call(f"{url}/{STREAM}", ASKED)
    checks.same("TLS: stream", text_of(events), text_of(whole))
    replied = buf.call(f"{url}/{GENERATE}", ASKED, "--schema", PROTOS)
    checks.same("TLS: over protos", text_of(replied), text_of(whole))
    _refused(checks, "TLS: a root it does not know", Buf(program), url)
    _refused(checks, "TLS: another name", Buf(program, *trusting, "--servername", "other"), url)


def judge_mtls(checks: Checks, program: str, folder: Path, address: str) -> None:
    url = f"https://localhost:{address.rpartition(':')[2]}"
    trusting = ("--cacert", str(folder / "root.pem"))
    pair = ("--cert", str(folder / "client_cert.pem"), "--key", str(folder / "client_key.pem"))
    reply = Buf(program, *trusting, *pair).call(f"{url}/{GENERATE}", ASKED)
    checks.holds("mTLS: Generate over reflection", "usage" in reply, text_of(reply))
    _refused(checks, "mTLS: no certificate", Buf(program, *trusting), url)
    other = ("--cert", str(folder / "cert.pem"), "--key", str(folder / "key.pem"))
    _refused(checks, "mTLS: another root's certificate", Buf(program, *trusting, *other), url)


def _refused(checks: Checks, name: str, buf: Buf, url: str) -> None:
    done = buf.run("--schema", PROTOS, "-d", "{}", f"{url}/{LIST_MODELS}")
    about_tls = any(word in done.stderr.lower() for word in ("tls", "certificate", "unavailable"))
    checks.holds(name, done.returncode and about_tls, done.stderr)


def main() -> int:
    part, program, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if part == "certificates":
        write_certificates(folder)
        return 0
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    checks = Checks(f"buf curl {version.stdout.strip()} {part}")
    judges = {"plain": judge_plain, "tls": judge_tls, "mtls": judge_mtls}
    checks.part(lambda address: judges[part](checks, program, folder, address), sys.argv[4])
    return checks.end()


if __name__ == "__main__":
    sys.exit(main())
