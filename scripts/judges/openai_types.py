"""Our OpenAI bodies under the eyes of the `openai` package: `scripts/judges/openai_types`.

The part `ours` runs under this project's interpreter, `check` under one that has the package.
"""

import json
import sys
import tempfile
import typing
from pathlib import Path
from typing import Any


def write_ours(path: Path) -> None:
    """Writes replies of a batch on a tiny model, and the names of all fields we know."""
    from jaxserve.config import load_config
    from jaxserve.engine import Completion
    from jaxserve.errors import RequestError
    from jaxserve.llm import LLM
    from jaxserve.server.openai import ENDPOINTS, build_error, build_reply, open_chat, read_asked
    from jaxserve.server.openai.fields import HARMLESS, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
    from tests.checkpoint.writers import T1, make_weights, write_hf
    from tests.text.vocabularies import CHAT_TEMPLATE

    chat, completions = ENDPOINTS
    user = {"role": "user", "content": "hello world"}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (chat, {"messages": [user], "max_completion_tokens": 5}),
        (chat, {"messages": [user], "stop": ["e", "a", " "], "max_tokens": 20, "seed": 3}),
        (chat, {"messages": [user], "max_tokens": 2, "return_token_ids": True}),
        (completions, {"prompt": "hello", "max_tokens": 4}),
        (completions, {"prompt": [[5, 6], [7]], "max_tokens": 3, "temperature": 0}),
        (chat, {"messages": [user], "n": 2, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}),
        (completions, {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 2}),
        (completions, {"prompt": "hello", "echo": True, "logprobs": 1, "max_tokens": 0}),
        (chat, {"messages": [user], "response_format": {"type": "json_object"}, "max_tokens": 9}),
        (completions, {"prompt": "hello", "best_of": 2}),
        (completions, {"prompt": "hello", "max_tokens": 4000}),
        (completions, {"prompt": "hello", "model": "gpt-4"}),
    ]
    config = load_config(flags={"model.max_model_tokens": 128, "buckets.capture": False})
    written: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_hf(Path(folder) / "tiny", T1, make_weights(T1))
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        with LLM(str(model), config) as llm:
            for url, body in bodies:
                try:
                    asked = read_asked(url, body, engine=llm.engine)
                    results = list(llm.generate_each(asked.requests))
                    if errors := [error for error in results if isinstance(error, RequestError)]:
                        raise errors[0]
                except RequestError as error:
                    written.append({"kind": "error", "body": build_error(error)})
                    continue
                done = [result for result in results if isinstance(result, Completion)]
                reply = build_reply(
                    asked,
                    done,
                    model_name=llm.model.name,
                    created_s=1.7e9,
                    tokenizer=llm.tokenizer,
                    chat=open_chat(asked, llm.engine, done[0].prompt_ids),
                )
                written.append({"kind": url, "body": reply})
    known = {
        chat: [*ENDPOINTS[chat].model_fields, *REFUSED_IN_CHAT, *HARMLESS],
        completions: [*ENDPOINTS[completions].model_fields, *REFUSED_IN_COMPLETIONS, *HARMLESS],
    }
    path.write_text(json.dumps({"replies": written, "known": known}, indent=1))


def check(path: Path) -> int:
    """Prints what the package finds; returns the number of faults."""
    import openai
    from openai.types import Completion, completion_create_params
    from openai.types.chat import ChatCompletion
    from openai.types.chat import completion_create_params as chat_create_params
    from openai.types.shared import ErrorObject

    ours = json.loads(path.read_text())
    types = {
        "/v1/chat/completions": ChatCompletion,
        "/v1/completions": Completion,
    }
    params = {
        "/v1/chat/completions": chat_create_params.CompletionCreateParamsBase,
        "/v1/completions": completion_create_params.CompletionCreateParamsBase,
    }
    faults: list[str] = []
    for reply in ours["replies"]:
        body = reply["body"]
        for choice in body.get("choices", ()):
            _drop_first_of_prompt(choice.get("logprobs") or {})
        try:
            if reply["kind"] == "error":
                ErrorObject.model_validate(body["error"], strict=True)
            else:
                types[reply["kind"]].model_validate(body, strict=True)
        except ValueError as error:
            faults.append(f"{reply['kind']}: {error}")
    for url, kind in params.items():
        sent = {*typing.get_type_hints(kind), "stream"}
        faults += [f"{url}: {name} is not known" for name in sorted(sent - {*ours["known"][url]})]
        print(f"{url}: {len(sent)} parameters of the package")
    for fault in faults:
        print(f"FAULT {fault}")
    print(f"openai {openai.__version__}: {len(ours['replies'])} bodies, {len(faults)} faults")
    return len(faults)


def _drop_first_of_prompt(logprobs: dict[str, list[Any]]) -> None:
    """OpenAI sends null for what nothing predicts; the package's types do not know of it."""
    if logprobs.get("token_logprobs", [0.0])[0] is None:
        for values in logprobs.values():
            del values[0]


def main() -> int:
    part, path = sys.argv[1], Path(sys.argv[2])
    if part == "check":
        return int(check(path) > 0)
    write_ours(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
