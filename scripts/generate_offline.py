"""Answers a file of prompts through the Python API: a small `jaxserve batch` to start from.

    python scripts/generate_offline.py prompts.jsonl answers.jsonl [MODEL]

A line of the input is {"prompt": text} or {"messages": [{"role", "content"}, …]}, with any of the
fields of `SamplingParams`. Each line of the output, in the same order, has the text or the error.
Answers that are there already are kept: run it again after an interruption.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxserve import LLM, SamplingParams
from jaxserve.engine import Completion
from jaxserve.errors import InvalidRequestError, RequestError
from jaxserve.request import ChatMessage, ChatPrompt, GenerationRequest


def read_requests(path: Path, num_done: int) -> Iterator[GenerationRequest | RequestError]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if number <= num_done:
                continue
            try:
                fields = json.loads(line)
                messages, prompt = fields.pop("messages", None), fields.pop("prompt", "")
                if messages is not None:
                    prompt = ChatPrompt(messages=tuple(ChatMessage(**turn) for turn in messages))
                params = SamplingParams(**({"seed": number} | fields))  # the same in every run
                yield GenerationRequest(prompt=prompt, sampling=params)
            except (ValueError, TypeError, AttributeError) as error:
                yield InvalidRequestError(f"line {number}: {error}")


def main(source: Path, target: Path, model: str = "smollm2-135m-instruct") -> int:
    done = target.read_bytes() if target.exists() else b""
    num_done, num_failed = done.count(b"\n"), 0
    with target.open("ab") as file, LLM(model) as llm:
        file.truncate(done.rfind(b"\n") + 1)  # the last line may be half a line
        for result in llm.generate_each(read_requests(source, num_done)):
            if isinstance(result, Completion):
                answer = {"text": result.text, "tokens": result.usage.completion_tokens}
            else:
                answer, num_failed = {"error": str(result)}, num_failed + 1
            file.write(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
            file.flush()
            num_done += 1
            print(f"\r{num_done} lines, {num_failed} failed", end="", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
