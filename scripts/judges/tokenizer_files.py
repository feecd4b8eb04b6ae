"""Real tokenizer files: this runtime's ids, texts and chats against transformers and SentencePiece.

Each part runs under the interpreter that has what it needs; `scripts/judges/tokenizers` runs them
all. Everything is compared exactly.
"""

import argparse
import collections
import json
import sys
from pathlib import Path
from typing import Any

from scripts.judges.vocab import make_texts

# transformers 5 builds these classes anew instead of reading their tokenizer.json, and its Llama
# drops the prefix space of a text that begins with one (SentencePiece does not).
READ_AS_IT_IS = {"llama2"}
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
TALKS = {
    "one": [(USER, "Hi <there> & \"you\" 'é' 日本")],
    "system": [(SYSTEM, "Be brief.\n"), (USER, " What is 2+2? ")],
    "turns": [(USER, "a"), (ASSISTANT, "b\n\nc"), (USER, "  d")],
    "all": [
        (SYSTEM, "s"),
        (USER, "a"),
        (ASSISTANT, "b"),
        (USER, "c"),
        (ASSISTANT, "d"),
        (USER, ""),
    ],
    "no question": [(USER, "a"), (ASSISTANT, "b")],
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "get_weather", "description": "Weather of a place", "parameters": CITY}
VARIABLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [{"type": "function", "function": TOOL}]},
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def messages_of(talk: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in TALKS[talk]]


def folders_in(path: Path) -> list[Path]:
    found = sorted(folder for folder in path.iterdir() if folder.is_dir())
    if not found:
        raise SystemExit(f"judges/tokenizers: nothing in {path}")
    return found


def run_transformers(path: Path) -> dict[str, dict[str, Any]]:
    """Returns by folder: ids with and without added specials, their text, and chats' ids."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    texts = make_texts()
    answers = {}
    for folder in folders_in(path):
        is_read = folder.name in READ_AS_IT_IS
        auto = transformers.PreTrainedTokenizerFast if is_read else transformers.AutoTokenizer
        tokenizer = auto.from_pretrained(str(folder))
        bare = tokenizer(texts, add_special_tokens=False).input_ids
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        chats = {}
        for talk in TALKS if tokenizer.chat_template else ():
            try:
                chat = tokenizer.apply_chat_template(
                    messages_of(talk), add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # noqa: BLE001  (jinja's, or the template's own)
                chat = str(error)
            chats[talk] = chat
        answers[folder.name] = {
            "full": tokenizer(texts).input_ids,
            "bare": bare,
            "texts": [tokenizer.decode(ids, **options) for ids in bare],
            "chats": chats,
        }
    return answers


def run_sentencepiece(path: Path) -> dict[str, dict[str, Any]]:
    """Returns by folder: ids in which no special token is parsed, and their text."""
    import sentencepiece

    answers = {}
    for folder in folders_in(path):
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        ids = [model.encode(text) for text in make_texts()]
        answers[folder.name] = {"plain": ids, "texts": [model.decode(row) for row in ids]}
    return answers


def run_templates(path: Path) -> dict[str, str | None]:
    """Returns what transformers renders, by template, talk, variables and generation prompt."""
    from transformers.utils.chat_template_utils import render_jinja_template

    answers: dict[str, str | None] = {}
    for template in sorted(path.glob("*.jinja")):
        for key, talk, variables, is_open in renderings(template.stem):
            try:
                rendered = render_jinja_template(
                    [messages_of(talk)],
                    chat_template=template.read_text(),
                    add_generation_prompt=is_open,
                    **NAMED,
                    **VARIABLES[variables],
                )
                answers[key] = rendered[0][0]
            except Exception:  # noqa: BLE001  (jinja's, or the template's own)
                answers[key] = None
    return answers


def renderings(template: str) -> list[tuple[str, str, str, bool]]:
    return [
        (f"{template}|{talk}|{variables}|{is_open}", talk, variables, is_open)
        for talk in TALKS
        for variables in VARIABLES
        for is_open in (True, False)
    ]


def compare_folder(folder: Path, answers: dict[str, Any]) -> int:
    """Prints how many answers are ours too; returns how many are not."""
    from jaxserve.errors import InvalidRequestError
    from jaxserve.request import ChatMessage, ChatPrompt
    from jaxserve.text.hf_folder import load_tokenizer

    tokenizer = load_tokenizer(folder)
    texts = make_texts()
    equal: collections.Counter[str] = collections.Counter()
    faults = 0
    rows: list[tuple[str, object, object, object]] = []
    for kind in ("full", "bare"):
        for text, wanted in zip(texts, answers.get(kind, ()), strict=False):
            got = tokenizer.encode(text, add_special_tokens=kind == "full")
            if kind == "full" and wanted[1:] == got and wanted[0] == tokenizer.bos_id == got[0]:
                wanted = got  # a text that spells BOS gets no second one here
            rows.append((kind, text, got, wanted))
    for text, wanted in zip(texts, answers.get("plain", ()), strict=False):
        rows.append(("plain", text, tokenizer._plain.encode(text).ids, wanted))
    all_ids = answers.get("bare") or answers["plain"]
    for ids, wanted in zip(all_ids, answers["texts"], strict=True):
        rows.append(("text", ids, tokenizer.decode(ids), wanted))
    for talk, wanted in answers.get("chats", {}).items():
        messages = tuple(ChatMessage(role=role, content=text) for role, text in TALKS[talk])
        try:
            got_chat: object = tokenizer.encode_chat(ChatPrompt(messages=messages))
        except InvalidRequestError as error:
            got_chat = wanted if isinstance(wanted, str) and wanted in str(error) else str(error)
        rows.append(("chat", talk, got_chat, wanted))
    for kind, asked, got_row, wanted in rows:
        equal[kind] += got_row == wanted
        if got_row != wanted:
            faults += 1
            if faults <= 3:
                print(f"    {kind} of {str(asked)[:60]!r}: {str(got_row)[:90]} {str(wanted)[:90]}")
    totals = collections.Counter(kind for kind, *_ in rows)
    print(f"{folder.name:12}", *(f"{kind} {equal[kind]} of {totals[kind]};" for kind in totals))
    return faults


def compare_templates(path: Path, answers: dict[str, str | None]) -> int:
    """Prints how the templates render here; returns how many do so otherwise."""
    from jaxserve.errors import InvalidRequestError
    from jaxserve.text.chat import ChatTemplate

    counts: collections.Counter[str] = collections.Counter()
    for source in sorted(path.glob("*.jinja")):
        template = ChatTemplate(source.read_text())
        for key, talk, variables, is_open in renderings(source.stem):
            try:
                got: str | None = template.render(
                    messages_of(talk),
                    add_generation_prompt=is_open,
                    variables=NAMED | VARIABLES[variables],
                )
            except InvalidRequestError:
                got = None
            match answers[key], got:
                case None, None:
                    counts["refused by both"] += 1
                case None, str():
                    counts["refused by transformers alone"] += 1
                case wanted, got if wanted == got:
                    counts["equal"] += 1
                case _:
                    counts["wrong"] += 1
                    print(f"    wrong: {key}")
    print("templates:", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return counts["wrong"] + (counts["equal"] == 0)


def compare(files: Path, templates: Path) -> int:
    faults = 0
    for kind, peer in (("hf", "transformers"), ("sentencepiece", "sentencepiece")):
        answers = json.loads((files / f"{peer}.json").read_text())
        for folder in folders_in(files / kind):
            faults += compare_folder(folder, answers[folder.name])
    return faults + compare_templates(templates, json.loads((files / "templates.json").read_text()))


def main() -> int:
    parts = {
        "transformers": run_transformers,
        "sentencepiece": run_sentencepiece,
        "templates": run_templates,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*parts, "compare"])
    parser.add_argument(
        "paths", nargs=2, type=Path, help="files and output; or files and templates"
    )
    arguments = parser.parse_args()
    first, second = arguments.paths
    if arguments.part != "compare":
        second.write_text(json.dumps(parts[arguments.part](first)))
        return 0
    faults = compare(first, second)
    print(f"compare: {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
