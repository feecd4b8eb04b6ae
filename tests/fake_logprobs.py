"""The fake model's log-probabilities: a real distribution that depends on every token so far."""

import zlib
from array import array
from collections.abc import Sequence

import numpy as np

from jaxserve.plan import TokenLogprobs


def next_logprobs(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    """Returns the log-probability of each token after these; no two are equal."""
    seed = zlib.crc32(array("q", tokens).tobytes()) * 0xBF58476D1CE4E5B9 % 2**64
    ids = np.arange(1, vocab_size + 1, dtype=np.uint64)
    mixed = ids * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(seed)
    mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0x94D049BB133111EB)
    logits = (mixed >> np.uint64(40)) % np.uint64(8192) / 1024 + ids * 1e-6
    logprobs: np.ndarray = logits - np.log(np.sum(np.exp(logits)))
    return logprobs


def token_logprobs(
    tokens: Sequence[int], token_id: int, *, num_top: int, vocab_size: int
) -> TokenLogprobs:
    """Returns what a step reports of a token that comes after these."""
    logprobs = next_logprobs(tokens, vocab_size)
    top_ids = np.argsort(-logprobs)[:num_top].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        rank=1 + int(np.sum(logprobs > logprobs[token_id])),
        top_ids=tuple(top_ids),
        top_logprobs=tuple(float(logprobs[id_]) for id_ in top_ids),
    )


def expected_logprobs(
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    num_top: int,
    vocab_size: int,
    seen_as: int = 0,
) -> list[TokenLogprobs]:
    """Returns what a request that got this output must be told of each of its tokens.

    Args:
      seen_as: what the model that runs adds to each token.
    """
    tokens = (*prompt, *output)
    seen = [token + seen_as for token in tokens]
    return [
        token_logprobs(seen[:index], tokens[index], num_top=num_top, vocab_size=vocab_size)
        for index in range(len(prompt), len(tokens))
    ]


def expected_prompt_logprobs(
    prompt: Sequence[int], *, num_top: int, vocab_size: int, seen_as: int = 0
) -> list[TokenLogprobs]:
    """Returns what must be told of a prompt's tokens, from the second on."""
    return expected_logprobs(
        prompt[:1], prompt[1:], num_top=num_top, vocab_size=vocab_size, seen_as=seen_as
    )
