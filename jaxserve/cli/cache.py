"""`jaxserve cache explain`: why two prompts share what is computed of them, or do not."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Final

from jaxserve.cli import exit_codes
from jaxserve.cli.options import add_model_options, read_config
from jaxserve.config import Config
from jaxserve.engine.cache_explain import (
    Explanation,
    build_namespaces,
    encode_prompt,
    explain_sharing,
)
from jaxserve.engine.chat_template import replace_template
from jaxserve.engine.start import find_changing_ropes
from jaxserve.errors import InvalidRequestError

EXPLAIN: Final = "say why two prompts share computed K/V, or do not"
EPILOG: Final = """\
examples:
  jaxserve cache explain --prompts "You are kind. Hello" "You are kind. Bye"
  jaxserve cache explain --chat --files monday.txt tuesday.txt
  jaxserve cache explain --prompts a b --tenants acme bolt --config server.toml

No weights are read and no server is asked: this is the rule, for a pool that
has room. Whether a server did share is in usage.cached_prompt_tokens and in
the metrics prefix_cache_*. docs/prefix-cache.md.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "cache",
        help=EXPLAIN,
        description="Look at the prefix cache's rules.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    explain = actions.add_parser(
        "explain",
        help=EXPLAIN,
        description="Say what the second of two requests would find of the first, and why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    prompts = explain.add_mutually_exclusive_group(required=True)
    pair = ("FIRST", "SECOND")
    prompts.add_argument("--prompts", nargs=2, metavar=pair, help="the prompts themselves")
    prompts.add_argument("--files", nargs=2, type=Path, metavar=pair, help="UTF-8 files of them")
    explain.add_argument(
        "--chat", action="store_true", help="each is a user's turn, in the model's chat template"
    )
    explain.add_argument(
        "--tenants", nargs=2, default=("", ""), metavar=pair, help="who asks (default: nobody)"
    )
    explain.add_argument(
        "--salts", nargs=2, default=("", ""), metavar=pair, help="cache_salt of each"
    )
    add_model_options(explain, log_level="error")
    explain.add_argument("--json", action="store_true", help="one JSON object instead of text")
    explain.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what the second finds, or in what the two differ."""
    from jaxserve.checkpoint.registry import find_model

    config = read_config(options).config
    header = replace_template(find_model(options.model).load_header(), config.model.chat_template)
    ropes = find_changing_ropes(layer.rope for layer in header.config.layers)
    namespaces = build_namespaces(config, changing_ropes=ropes)
    texts = options.prompts or [_read(path) for path in options.files]
    prompts = [encode_prompt(text, header.tokenizer, is_chat=options.chat) for text in texts]
    identities = [
        namespaces.find_identity(tenant, salt, prompt_len=len(prompt))
        for tenant, salt, prompt in zip(options.tenants, options.salts, prompts, strict=True)
    ]
    first, second = zip(prompts, identities, strict=True)
    found = explain_sharing(first, second, page_size=config.kv.page_size)
    if options.json:
        print(json.dumps(dataclasses.asdict(found) | {"why": explain_why(found, config)}))
    else:
        print("\n".join(write_lines(found, config)))
        if found.num_common < min(len(prompts[0]), len(prompts[1])):
            spelled = [header.tokenizer.decode([ids[found.num_common]]) for ids in prompts]
            print(f"token {found.num_common}: {spelled[0]!r} and {spelled[1]!r}")
    return exit_codes.OK


def write_lines(found: Explanation, config: Config) -> list[str]:
    """Returns the text: how long they are, what is shared, and why no more is."""
    page_size = config.kv.page_size
    copied = f", {found.num_copied} of the next page are copied" if found.num_copied else ""
    return [
        f"tokens: {found.num_first} and {found.num_second}, the first {found.num_common} the same",
        f"shared: {found.num_pages} pages of {page_size}{copied}; {found.num_computed} of the "
        "second's tokens are computed",
        f"why: {explain_why(found, config)}",
    ]


def explain_why(found: Explanation, config: Config) -> str:
    """Returns what decides how much is shared."""
    if not config.prefix_cache.enabled:
        return "prefix_cache.enabled is false: nothing is kept"
    if found.differs_in is not None and found.values is not None:
        first, second = (repr(value) for value in found.values)
        return f"nothing is shared: {_DIFFERENT[found.differs_in]} ({first} and {second})"
    num_shared = found.num_second - found.num_computed
    num_left = min(found.num_common, found.num_second - 1) - num_shared
    if num_left:
        what = "token more is" if num_left == 1 else "tokens more are"
        return f"{num_left} {what} the same, but less than a quarter of a page is not copied"
    if found.num_computed == 1:
        return "all of the second is there up to its last token, which is always computed"
    if found.num_common == found.num_first:
        return "the first ends there; what it wrote is kept too, and may go on like the second"
    return "they differ from there on, and what follows depends on all that is before it"


_SHARING: Final = "prefix_cache.shared_namespaces alone lets tenants share"
_DIFFERENT: Final = {
    "owner": f"the tenants differ; {_SHARING}",
    "scope": f"one of the tenants has a namespace with others; {_SHARING}",
    "salt": "the salts differ",
    "positions": "the model's positions follow the prompt's length, and theirs differ",
}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"--files {path}: {error.strerror}", field="files") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--files {path} is not UTF-8 at byte {error.start}; convert it", field="files"
        ) from None
