"""`jaxserve keys`: makes, lists and revokes the keys of a server's clients."""

import argparse
import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.errors import ConfigError
from jaxserve.server.keys_file import Key, add_key, find_exposure, make_key, read_keys, remove_keys

EPILOG: Final = """\
examples:
  jaxserve keys new --file keys.jsonl --tenant acme --name "their laptop"
  jaxserve keys new --file keys.jsonl --tenant guests --expires 30d
  jaxserve keys list --file keys.jsonl
  jaxserve keys revoke --file keys.jsonl 3f9ac2d1e07b

The key is printed once and kept nowhere: the file holds its SHA-256. A server
with auth.keys_file = "keys.jsonl" sees a change within auth.reload_interval_s,
at SIGHUP, or when an administrator calls ReloadCredentials. docs/security.md.
"""
NEW: Final = "make a key and print it"
LIST: Final = "list the keys' ids and tenants"
REVOKE: Final = "take keys away"
_SPAN: Final = re.compile(r"([1-9]\d{0,5})([hd])", re.ASCII)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "keys",
        help="make, list and revoke the keys of a server's clients",
        description="Make, list and revoke the keys that clients of `jaxserve serve` show.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    new = actions.add_parser("new", help=NEW, description=f"{NEW.capitalize()}.")
    _add_file(new)
    new.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    new.add_argument("--name", default="", metavar="TEXT", help="what it is for; only shown")
    new.add_argument(
        "--expires", metavar="WHEN", help="30d, 12h, or a date such as 2027-01-31; default: never"
    )
    new.set_defaults(run=run_new, log_level="warning")
    listing = actions.add_parser("list", help=LIST, description=f"{LIST.capitalize()}.")
    _add_file(listing)
    listing.add_argument("--json", action="store_true", help="one JSON array")
    listing.set_defaults(run=run_list, log_level="warning")
    revoke = actions.add_parser("revoke", help=REVOKE, description=f"{REVOKE.capitalize()}.")
    _add_file(revoke)
    revoke.add_argument("ids", nargs="+", metavar="ID", help="as `jaxserve keys list` shows it")
    revoke.set_defaults(run=run_revoke, log_level="warning")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--file", type=Path, required=True, metavar="FILE", help="the server's auth.keys_file"
    )


def run_new(options: argparse.Namespace) -> int:
    """Adds a key to the file and prints it, alone on stdout."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    expires = None if options.expires is None else read_expiry(options.expires, now)
    text, key = make_key(options.tenant, name=options.name, now=now, expires=expires)
    add_key(options.file, key)
    print(text)
    return exit_codes.OK


def run_list(options: argparse.Namespace) -> int:
    """Prints the keys, the oldest line first."""
    keys = read_keys(options.file)
    now = datetime.datetime.now(datetime.UTC)
    if options.json:
        print(json.dumps([as_json(key, now) for key in keys], indent=2, ensure_ascii=False))
        return exit_codes.OK
    for line in as_table(keys, now):
        print(line)
    if exposure := find_exposure(options.file):
        print(f"note: {exposure}")
    return exit_codes.OK


def run_revoke(options: argparse.Namespace) -> int:
    """Takes keys out of the file."""
    for key in remove_keys(options.file, options.ids):
        print(f"revoked {key.id} of {key.tenant}")
    return exit_codes.OK


def read_expiry(text: str, now: datetime.datetime) -> datetime.datetime:
    """Returns when a key ends.

    Raises:
      ConfigError: it is neither a time from now nor a date, or it is over.
    """
    if span := _SPAN.fullmatch(text):
        hours = int(span[1]) * (24 if span[2] == "d" else 1)
        return now + datetime.timedelta(hours=hours)
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"--expires {text!r} is neither a time such as 30d or 12h nor a date such as "
            "2027-01-31 or 2027-01-31T12:00+01:00"
        ) from error
    when = when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when
    if when <= now:
        raise ConfigError(f"--expires {text} is over already; choose a later time")
    return when


def as_json(key: Key, now: datetime.datetime) -> dict[str, object]:
    """Returns one object of `--json`; its keys are API."""
    return {
        "id": key.id,
        "tenant": key.tenant,
        "name": key.name,
        "created": key.created and key.created.isoformat(),
        "expires": key.expires and key.expires.isoformat(),
        "is_expired": key.is_expired(now),
    }


def as_table(keys: Sequence[Key], now: datetime.datetime) -> list[str]:
    """Returns a line for each key, in columns."""
    rows = [("id", "tenant", "created", "expires", "name")]
    rows += [
        (key.id, key.tenant, _day(key.created) or "-", _end(key, now), key.name) for key in keys
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([*(row[c].ljust(widths[c]) for c in range(4)), row[4]]).rstrip() for row in rows
    ]


def _end(key: Key, now: datetime.datetime) -> str:
    if key.expires is None:
        return "never"
    return "expired" if key.is_expired(now) else _day(key.expires)


def _day(when: datetime.datetime | None) -> str:
    return "" if when is None else when.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%MZ")
