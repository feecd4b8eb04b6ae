"""The sampler once more: python integers, float64, one row at a time, sorting as textbooks do."""

import dataclasses
import math

import numpy as np

MASK = (1 << 32) - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What a request asks of one draw, and the tokens before it."""

    seed: int = 0
    choice: int = 0
    output_index: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    bans: tuple[int, ...] = ()
    min_tokens: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def reference_token(logits: np.ndarray, row: Row) -> int:
    """Returns the token of one row of real logits."""
    scores = adjusted(logits, row)
    if row.temperature <= 1e-5:
        return int(np.argmax(scores))
    kept = kept_ids((scores - scores.max()) / row.temperature, row)
    noised = {
        v: (scores[v] - scores.max()) / row.temperature + gumbel(row, v)
        for v in kept
        if scores[v] > -math.inf
    }
    return max(noised, key=lambda v: noised[v])


def adjusted(logits: np.ndarray, row: Row) -> np.ndarray:
    """Returns the logits after bans, biases and penalties."""
    scores = logits.astype(np.float64)
    for v in row.bans:
        if row.output_index < row.min_tokens:
            scores[v] = -math.inf
    for v, value in row.bias:
        scores[v] += value
    for v in range(len(scores)):
        if v in row.prompt or v in row.output:
            scores[v] *= row.repetition if scores[v] <= 0 else 1 / row.repetition
        scores[v] -= row.frequency * row.output.count(v)
        scores[v] -= row.presence * (v in row.output)
    return scores


def kept_ids(scaled: np.ndarray, row: Row) -> list[int]:
    """Returns the ids that top-k, then top-p of those, then min-p keep; ties with the last stay."""
    kept = list(range(len(scaled)))
    if 0 < row.top_k < len(scaled):
        kth = sorted(scaled, reverse=True)[row.top_k - 1]
        kept = [v for v in kept if scaled[v] >= kth]
    if row.top_p < 1:
        total, share, least = sum(math.exp(scaled[v]) for v in kept), 0.0, -math.inf
        for v in sorted(kept, key=lambda v: -scaled[v]):
            share += math.exp(scaled[v]) / total
            if share >= row.top_p:
                least = scaled[v]
                break
        kept = [v for v in kept if scaled[v] >= least]
    if row.min_p > 0:
        kept = [v for v in kept if math.exp(scaled[v]) >= row.min_p]
    return kept


def gumbel(row: Row, token: int) -> float:
    """The noise of one id: threefry of (seed; output index, choice), then of (that; id, 0)."""
    key = threefry((row.seed >> 32, row.seed & MASK), (row.output_index, row.choice))
    bits, _ = threefry(key, (token, 0))
    return -math.log(-math.log1p(-(bits + 0.5) / 2**32))


def threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 as its paper lists it: a key injection before and after each four rounds."""
    words = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + words[0]) & MASK, (counter[1] + words[1]) & MASK
    for index in range(20):
        by = (13, 15, 26, 6, 17, 29, 16, 24)[index % 8]
        x = (x + y) & MASK
        y = ((y << by | y >> (32 - by)) & MASK) ^ x
        if index % 4 == 3:
            group = index // 4 + 1
            x = (x + words[group % 3]) & MASK
            y = (y + words[(group + 1) % 3] + group) & MASK
    return x, y
