"""What the clients ask for, neutral to the door, and how each door spells it."""

import dataclasses
import json
import random
from typing import Any, Final

from jaxserve.gen import generation_pb2

WORDS: Final = ("hello", "world", "the theme", "is that", "these users", "assist", "aba", "é🌶")
STOPS: Final = ("e", "a", " t", "hello", "zzz")
SCHEMA: Final = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
REGEX: Final = "[ab]{1,40}c"
CHOICES: Final = ("yes", "no", "maybe not")
FORMS: Final = ("schema", "object", "regex", "choice")
GOLDEN_TOKENS: Final = 40


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Ask:
    """One request, or with `more_prompts` several of the same kind.

    Attributes:
      form: one of `FORMS`; empty for none.
      golden: which of the fixed requests it is, whose output is known.
    """

    prompt: str
    max_tokens: int
    more_prompts: tuple[str, ...] = ()
    is_chat: bool = False
    n: int = 1
    temperature: float = 1.0
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    form: str = ""
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream_interval: int | None = None
    priority: int = 0
    golden: int | None = None


def make_golden(number: int) -> Ask:
    """Returns a request that always has the same output."""
    return Ask(
        prompt=f"{WORDS[number % len(WORDS)]} {number}",
        max_tokens=GOLDEN_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        golden=number,
    )


def make_ask(rng: random.Random, *, mean_tokens: int) -> Ask:
    """Returns a request of any kind, a fifth of them golden ones."""
    if rng.random() < 0.2:
        return make_golden(rng.randrange(len(WORDS)))
    prompt = " ".join(rng.choices(WORDS, k=rng.choice((1, 2, 4, 4, 8, 12))))
    form = rng.choice(FORMS) if rng.random() < 0.15 else ""
    return Ask(
        prompt=prompt,
        max_tokens=1 + min(int(rng.expovariate(1 / mean_tokens)), 4 * mean_tokens),
        is_chat=rng.random() < 0.4,
        n=rng.choice((2, 3, 4)) if rng.random() < 0.2 else 1,
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=0.9 if rng.random() < 0.2 else None,
        seed=rng.getrandbits(64) if rng.random() < 0.3 else None,
        stop=tuple(rng.sample(STOPS, k=2)) if rng.random() < 0.2 else (),
        logprobs=rng.choice((0, 1, 5)) if rng.random() < 0.2 else None,
        prompt_logprobs=rng.choice((0, 2)) if rng.random() < 0.05 else None,
        form=form,
        bad_words=("hello",) if rng.random() < 0.05 else (),
        ignore_eos=not form and rng.random() < 0.4,
        stream_interval=rng.choice((2, 8)) if rng.random() < 0.2 else None,
        priority=rng.choice((-1, 0, 0, 0)),
    )


def to_message(ask: Ask, request_id: str) -> generation_pb2.GenerateRequest:
    """Returns the request of GenerationService."""
    message = generation_pb2.GenerateRequest(request_id=request_id, priority=ask.priority)
    if ask.is_chat:
        message.chat.messages.add(role="user", content=ask.prompt)
    else:
        message.text = ask.prompt
    sampling, stop, output = message.sampling, message.stop, message.output
    for name in ("temperature", "top_p", "seed", "n"):
        value = getattr(ask, name)
        if value is not None:
            setattr(sampling, name, value)
    sampling.bad_words.extend(ask.bad_words)
    stop.max_tokens, stop.ignore_eos = ask.max_tokens, ask.ignore_eos
    stop.stop_strings.extend(ask.stop)
    output.include_token_ids = True
    for name in ("logprobs", "prompt_logprobs", "stream_interval"):
        value = getattr(ask, name)
        if value is not None:
            setattr(output, name, value)
    match ask.form:
        case "schema":
            message.structured_output.json_schema = json.dumps(SCHEMA)
        case "object":
            message.structured_output.json_object = True
        case "regex":
            message.structured_output.regex = REGEX
        case "choice":
            message.structured_output.choice.choices.extend(CHOICES)
    return message


def to_body(ask: Ask, *, stream: bool) -> tuple[str, dict[str, Any]]:
    """Returns the path and the body of an HTTP request."""
    body: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
        "n": ask.n,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "seed": ask.seed,
        "stop": list(ask.stop) or None,
        "bad_words": list(ask.bad_words) or None,
        "ignore_eos": ask.ignore_eos,
        "priority": ask.priority,
        "return_token_ids": True,
        **_form_of(ask),
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body["stream_interval"] = ask.stream_interval
    else:
        body["prompt_logprobs"] = ask.prompt_logprobs
    if ask.is_chat:
        body["messages"] = [{"role": "user", "content": ask.prompt}]
        if ask.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": ask.logprobs}
        return "/v1/chat/completions", body
    body["prompt"] = [ask.prompt, *ask.more_prompts] if ask.more_prompts else ask.prompt
    body["logprobs"] = ask.logprobs
    return "/v1/completions", body


def _form_of(ask: Ask) -> dict[str, Any]:
    match ask.form:
        case "schema":
            schema = {"name": "answer", "schema": SCHEMA}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "object":
            return {"response_format": {"type": "json_object"}}
        case "regex":
            return {"structured_outputs": {"regex": REGEX}}
        case "choice":
            return {"guided_choice": list(CHOICES)}
    return {}
