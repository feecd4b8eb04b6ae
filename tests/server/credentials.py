"""Files of certificates and keys for tests, and the sections that name them."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Final

import trustme

from jaxserve.client import Tls
from jaxserve.config import AuthSection, Section, TlsSection
from jaxserve.server.keys_file import add_key, make_key

LONG_AGO: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
HOST: Final = "localhost"


@dataclasses.dataclass(slots=True, kw_only=True)
class Files:
    """A folder with a server's certificate from a root of its own, and a root for its clients.

    Attributes:
      root: of the server's certificate.
      client_root: whose certificates the server lets in.
    """

    folder: Path
    root: trustme.CA = dataclasses.field(default_factory=trustme.CA)
    client_root: trustme.CA = dataclasses.field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.write(self.root.issue_cert(HOST))
        self.client_root.cert_pem.write_to_path(self.folder / "clients.pem")

    def write(self, leaf: trustme.LeafCert) -> None:
        """Puts a certificate and its key where the server reads them."""
        (self.folder / "cert.pem").write_bytes(chain(leaf))
        leaf.private_key_pem.write_to_path(self.folder / "key.pem")
        (self.folder / "key.pem").chmod(0o600)

    def expired(self) -> trustme.LeafCert:
        return self.root.issue_cert(
            HOST, not_before=LONG_AGO, not_after=LONG_AGO + datetime.timedelta(days=1)
        )

    def section(self, *, asks_for_certificates: bool = False) -> TlsSection:
        clients = self.folder / "clients.pem" if asks_for_certificates else None
        return TlsSection(
            cert_file=self.folder / "cert.pem",
            key_file=self.folder / "key.pem",
            client_ca_file=clients,
        )

    def trust(self, leaf: trustme.LeafCert | None = None) -> Tls:
        """Returns how a client trusts the server, with its own certificate if it has one."""
        return Tls(
            root_certificates=self.root.cert_pem.bytes(),
            certificate=None if leaf is None else chain(leaf),
            private_key=None if leaf is None else leaf.private_key_pem.bytes(),
            server_name=HOST,
        )


def chain(leaf: trustme.LeafCert) -> bytes:
    return b"".join(blob.bytes() for blob in leaf.cert_chain_pems)


def write_keys(folder: Path, *tenants: str) -> tuple[Path, list[str]]:
    """Makes a key for each tenant; returns the file and the keys."""
    path = folder / "keys.jsonl"
    made = [make_key(tenant, now=datetime.datetime.now(datetime.UTC)) for tenant in tenants]
    for _, key in made:
        add_key(path, key)
    return path, [text for text, _ in made]


def add_line(path: Path, **fields: str) -> None:
    """Adds a line as it is, right or wrong."""
    with path.open("a") as file:
        file.write(f"{json.dumps(fields)}\n")


def sections(keys: Path | None = None, tls: TlsSection | None = None) -> dict[str, Section]:
    return {"auth": AuthSection(keys_file=keys), "tls": tls or TlsSection()}
