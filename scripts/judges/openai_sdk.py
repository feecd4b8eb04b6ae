"""The `openai` package as a client: `scripts/judges/openai_sdk`. Runs under its own interpreter."""

import sys
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk

from scripts.judges.openai_sdk_client import CHAT, GREEDY, PROMPT, Judge
from scripts.judges.openai_sdk_uses import judge_ends, judge_errors, judge_forms, judge_tools


def judge_models(judge: Judge) -> None:
    checks, models = judge.checks, judge.client.models
    found = models.list().data
    checks.same("models.list", len(found), 1)
    checks.same("models.retrieve", models.retrieve(judge.model), found[0])
    checks.raises("models.retrieve of another", openai.NotFoundError, lambda: models.retrieve("x"))


def judge_completions(judge: Judge) -> None:
    checks = judge.checks
    whole = judge.complete(PROMPT)
    text = whole.choices[0].text
    checks.same(
        "object, finish_reason",
        (whole.object, whole.choices[0].finish_reason),
        ("text_completion", "length"),
    )
    ids = judge.client.post(
        f"{judge.url}/tokenize", body={"prompt": PROMPT}, cast_to=dict[str, Any]
    )["tokens"]
    usage = whole.usage
    checks.same(
        "usage",
        (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
        (len(ids), 12, len(ids) + 12),
    )
    checks.same("prompt as token ids", judge.complete(ids).choices[0].text, text)
    other = judge.complete("Once upon a time").choices[0].text
    for name, prompts in (
        ("prompts: texts", [PROMPT, "Once upon a time"]),
        ("prompts: lists of ids", [ids, ids]),
    ):
        choices = sorted(judge.complete(prompts).choices, key=lambda choice: choice.index)
        wanted = [text, other if isinstance(prompts[1], str) else text]
        checks.same(name, [choice.text for choice in choices], wanted)
    stopped = judge.complete(PROMPT, stop=[text[5:9]]).choices[0]
    checks.same(
        "stop", (stopped.text, stopped.finish_reason), (text[: text.index(text[5:9])], "stop")
    )
    scored = judge.complete(PROMPT, echo=True, logprobs=2, max_tokens=3)
    logprobs, scored_text = scored.choices[0].logprobs, scored.choices[0].text
    checks.same(
        "echo: the text", scored_text, PROMPT + judge.complete(PROMPT, max_tokens=3).choices[0].text
    )
    checks.same(
        "echo: the first token is not scored",
        (logprobs.token_logprobs[0], logprobs.top_logprobs[0]),
        (None, None),
    )
    checks.same("echo: tokens join to the text", "".join(logprobs.tokens), scored_text)
    pieces = [
        scored_text[at:].startswith(token)
        for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
    ]
    checks.holds("echo: text_offset", all(pieces), logprobs.text_offset)
    tops = zip(
        logprobs.tokens[1:], logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True
    )
    good = [value <= 0 and top[token] == value and 2 <= len(top) <= 3 for token, value, top in tops]
    checks.holds("echo: top_logprobs have the token", all(good), logprobs.token_logprobs[1:4])
    alone = judge.complete(PROMPT, echo=True, logprobs=0, max_tokens=0)
    checks.same(
        "echo with max_tokens 0",
        (alone.choices[0].text, alone.usage.completion_tokens),
        (PROMPT, 0),
    )
    drawn = [judge.complete(PROMPT, n=3, seed=7, temperature=1) for _ in range(2)]
    texts = [[choice.text for choice in reply.choices] for reply in drawn]
    checks.same("n: indexes", [choice.index for choice in drawn[0].choices], [0, 1, 2])
    checks.holds(
        "n: choices differ, a seed repeats them",
        len({*texts[0]}) == 3 and texts[0] == texts[1],
        texts[0],
    )
    extras = judge.complete(
        PROMPT,
        max_tokens=40,
        extra_body={
            "ignore_eos": True,
            "min_tokens": 40,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "priority": 1,
        },
    )
    checks.same("extras through extra_body", extras.usage.completion_tokens, 40)


def judge_chat(judge: Judge) -> None:
    checks = judge.checks
    whole = judge.chat(extra_headers={"x-request-id": "judge-1"})
    checks.same(
        "chat: object, role, finish_reason",
        (whole.object, whole.choices[0].message.role, whole.choices[0].finish_reason),
        ("chat.completion", "assistant", "length"),
    )
    checks.same("chat: x-request-id comes back", whole._request_id, "judge-1")
    usage = whole.usage
    checks.same("chat: cached_tokens are told", usage.prompt_tokens_details.cached_tokens, 0)
    short = judge.chat(max_tokens=openai.omit, max_completion_tokens=5)
    checks.same("max_completion_tokens", short.usage.completion_tokens, 5)
    told = judge.chat(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        ]
    )
    checks.holds(
        "developer, content in parts",
        told.choices[0].message.content,
        told.choices[0].message.content,
    )
    scored = judge.chat(logprobs=True, top_logprobs=3).choices[0]
    tokens = scored.logprobs.content
    joined = b"".join(bytes(token.bytes) for token in tokens).decode()
    checks.same("logprobs: bytes join to the content", joined, scored.message.content)
    checks.holds(
        "logprobs: three likeliest, the token first (greedy)",
        all(len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token for t in tokens),
        [round(t.logprob, 3) for t in tokens][:6],
    )
    several = judge.chat(n=2, temperature=1, seed=1)
    checks.same("chat: n", [choice.index for choice in several.choices], [0, 1])


def read_stream(stream: Any) -> tuple[list[Any], dict[int, str], dict[int, list[str]]]:  # noqa: ANN401
    """Returns the chunks, and by choice the text and the reasons for its end."""
    chunks = list(stream)
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            if choice.finish_reason:
                reasons.setdefault(choice.index, []).append(choice.finish_reason)
    return chunks, texts, reasons


def judge_streams(judge: Judge) -> None:
    checks = judge.checks
    asks: dict[str, Any] = {
        "chat": judge.chat,
        "completions": lambda **more: judge.complete(PROMPT, **more),
    }
    for name, ask in asks.items():
        whole = ask()
        message = getattr(whole.choices[0], "message", None)
        text = message.content if message else whole.choices[0].text
        chunks, texts, reasons = read_stream(
            ask(stream=True, stream_options={"include_usage": True})
        )
        checks.same(f"{name} stream: the text of the whole", texts, {0: text})
        checks.same(f"{name} stream: one end", reasons, {0: ["length"]})
        checks.same(
            f"{name} stream: usage last, without choices",
            (chunks[-1].choices, chunks[-1].usage),
            ([], whole.usage),
        )
        checks.holds(
            f"{name} stream: usage nowhere else",
            all(c.usage is None for c in chunks[:-1]),
            len(chunks),
        )
        chunks, _, _ = read_stream(ask(stream=True))
        checks.holds(
            f"{name} stream: no usage unasked", all(c.usage is None for c in chunks), len(chunks)
        )
        drawn = {"n": 2, "temperature": 1, "seed": 5}
        whole = ask(**drawn)
        wanted = {c.index: getattr(c, "text", None) or c.message.content for c in whole.choices}
        checks.same(f"{name} stream: n", read_stream(ask(stream=True, **drawn))[1], wanted)
    chunks, _, _ = read_stream(judge.chat(stream=True))
    checks.same("chat stream: the role first", chunks[0].choices[0].delta.role, "assistant")
    checks.holds(
        "chat stream: the package's chunks",
        all(type(c) is ChatCompletionChunk for c in chunks),
        len(chunks),
    )
    to_end: dict[str, Any] = GREEDY | {"stop": ["longest"]}  # or the package takes it for cut off
    with judge.client.chat.completions.stream(model=judge.model, messages=CHAT, **to_end) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    checks.same(
        "chat.completions.stream: final",
        final.choices[0].message.content,
        judge.chat(**to_end).choices[0].message.content,
    )
    checks.holds("chat.completions.stream: events", "content.done" in events, sorted({*events}))


def main() -> int:
    judge = Judge(sys.argv[1])
    for part in (
        judge_models,
        judge_completions,
        judge_chat,
        judge_streams,
        judge_forms,
        judge_tools,
        judge_errors,
        judge_ends,
    ):
        judge.checks.part(part, judge)
    return judge.checks.end()


if __name__ == "__main__":
    sys.exit(main())
