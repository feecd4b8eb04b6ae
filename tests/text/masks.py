"""Reading masks, and writing under them, for the tests of constraints."""

import random
from collections.abc import Collection, Iterable

import numpy as np

from jaxserve.plan import TokenMask
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraint, Constraints
from jaxserve.text.tokenizer import Tokenizer


def build_constraints(
    tokenizer: Tokenizer,
    *,
    eos_ids: Collection[int] | None = None,
    vocab_size: int | None = None,
    max_bytes: int = 64 << 10,
) -> Constraints:
    return Constraints(
        tokenizer,
        eos_ids=tokenizer.eos_ids if eos_ids is None else eos_ids,
        vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
        max_bytes=max_bytes,
    )


def open_constraint(
    constraints: Constraints,
    structured: StructuredOutput | None = None,
    sampling: SamplingParams | None = None,
) -> Constraint:
    constraint = constraints.build(sampling or SamplingParams(), structured)
    assert constraint is not None
    return constraint


def ids_in(mask: TokenMask) -> set[int]:
    return {
        word * 32 + bit
        for word in np.flatnonzero(mask).tolist()
        for bit in range(32)
        if int(mask[word]) >> bit & 1
    }


def fill_mask(constraint: Constraint) -> TokenMask:
    mask = np.full(len(constraint._allowed), 0x5A5A5A5A, np.uint32)
    constraint.fill(mask)
    return mask


def advance(constraint: Constraint, token_id: int) -> None:
    """Its output has one token more."""
    constraint.read([*[-1] * constraint._num_tokens, token_id])


def allowed(constraint: Constraint) -> set[int]:
    """The ids that may come next; not empty."""
    ids = ids_in(fill_mask(constraint))
    assert ids
    return ids


def read_ids(constraint: Constraint, token_ids: Iterable[int]) -> None:
    """Write tokens, each of which must be allowed."""
    for token_id in token_ids:
        assert token_id in allowed(constraint)
        advance(constraint, token_id)


def accepts(constraint: Constraint, text: str, tokenizer: Tokenizer) -> bool:
    """Whether this text may be the whole output, byte by byte."""
    fork = constraint.fork()
    single = {tokenizer.token_bytes(id): id for id in range(tokenizer.vocab_size)}
    for byte in text.encode():
        token_id = single[bytes([byte])]
        if token_id not in allowed(fork):
            return False
        advance(fork, token_id)
    return tokenizer.eos_ids <= allowed(fork)


def draw(
    constraint: Constraint,
    rng: random.Random,
    *,
    eos_ids: Collection[int],
    max_tokens: int = 2000,
    end_share: float = 0.5,
) -> list[int]:
    """Draws tokens at random under the mask until EOS; EOS with `end_share` where it is allowed."""
    output: list[int] = []
    for _ in range(max_tokens):
        ids = allowed(constraint)
        ends = sorted(ids & set(eos_ids))
        if ends and (len(ends) == len(ids) or rng.random() < end_share):
            return output
        token_id = rng.choice(sorted(ids - set(ends)))
        output.append(token_id)
        advance(constraint, token_id)
    raise AssertionError(f"no end after {max_tokens} tokens")
