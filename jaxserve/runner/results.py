"""The result arrays of a step: packed by the programs, read on the host.

All int32, floats as their bits, so that a program gives one array. Columns, for J alternatives:

    greedy, plain   token | is_finite | used_fallback
    full            token | is_finite | used_fallback | logprob | rank | top_ids_J | top_logprobs_J
    score                   is_finite |                 logprob | rank | top_ids_J | top_logprobs_J
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from jaxserve.model.logprobs import Logprobs
from jaxserve.model.sampling import Sampled
from jaxserve.plan import Bucket, PromptScoring, StepPlan, StepResult, TokenLogprobs
from jaxserve.runner.batch import SampledRows
from jaxserve.runner.spec import RunnerSpec


def pack_sampled(sampled: Sampled) -> Array:
    """Returns the columns of the sampled tokens, ``columns_B3``."""
    fallback_B = jnp.broadcast_to(sampled.used_fallback, sampled.token_B.shape)
    columns = (sampled.token_B, sampled.is_finite_B, fallback_B)
    return jnp.stack([column.astype(jnp.int32) for column in columns], axis=1)


def pack_logprobs(logprobs: Logprobs) -> Array:
    """Returns the columns of log-probabilities, ``[B, 2 + 2 * J]``."""
    return jnp.concatenate(
        [
            _bits(logprobs.logprob_B)[:, None],
            logprobs.rank_B[:, None],
            logprobs.top_ids_BJ,
            _bits(logprobs.top_logprobs_BJ),
        ],
        axis=1,
    )


def num_logprob_columns(spec: RunnerSpec) -> int:
    return 2 + 2 * spec.max_logprobs


def _bits(value: Array) -> Array:
    return lax.bitcast_convert_type(value, jnp.int32)


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class ResultLayout:
    """Whose result is in which row: what the host keeps of a launched step.

    Attributes:
      bucket: the forward program that ran.
      sampled: whose token each row of the output's result is; the rows after them are padding.
      scored: sequences with the prompt tokens that were scored, in the order of the score
        program's rows.
      vocab_size: no more alternatives than this are real.
    """

    bucket: Bucket
    sampled: SampledRows
    scored: tuple[tuple[int, PromptScoring], ...]
    vocab_size: int


def build_layout(
    plan: StepPlan, bucket: Bucket, sampled: SampledRows, spec: RunnerSpec
) -> ResultLayout:
    return ResultLayout(
        bucket=bucket,
        sampled=sampled,
        scored=plan.scored,
        vocab_size=spec.model.vocab_size,
    )


def read_result(
    layout: ResultLayout, output_RI: np.ndarray | None, scores: Sequence[np.ndarray]
) -> StepResult:
    """Returns the step's result in the words of the plan; a sequence whose logits are not finite
    has no log-probabilities.

    Args:
      output_RI: of the output program; None where nothing is sampled.
      scores: of the runs of the score program.
    """
    not_finite: set[int] = set()
    token_ids: dict[int, int] = {}
    logprobs: dict[int, TokenLogprobs] = {}
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    score_rows = itertools.chain.from_iterable(scores)
    for sequence_id, scoring in layout.scored:
        rows = list(itertools.islice(score_rows, len(scoring.targets)))
        if all(columns_I[0] for columns_I in rows):
            num_top = min(scoring.num_top, layout.vocab_size)
            entries = _read_logprobs(np.stack(rows)[:, 1:], scoring.targets, [num_top] * len(rows))
            prompt_logprobs[sequence_id] = tuple(entries)
        else:
            not_finite.add(sequence_id)
    if output_RI is not None:
        sampled = layout.sampled
        ids = sampled.sequence_ids
        tokens, are_finite = output_RI[: len(ids), :2].T.tolist()
        token_ids = dict(zip(ids, tokens, strict=True))
        if not all(are_finite):
            not_finite.update(ids[r] for r, is_finite in enumerate(are_finite) if not is_finite)
        wanted = [r for r, num_top in enumerate(sampled.num_top) if num_top is not None]
        wanted = [r for r in wanted if are_finite[r]]
        if wanted:
            num_tops = [min(sampled.num_top[r] or 0, layout.vocab_size) for r in wanted]
            found = _read_logprobs(output_RI[wanted, 3:], [tokens[r] for r in wanted], num_tops)
            logprobs = dict(zip((ids[r] for r in wanted), found, strict=True))
    return StepResult(
        token_ids=token_ids,
        not_finite=frozenset(not_finite),
        bucket=layout.bucket,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _read_logprobs(
    columns_RI: np.ndarray, token_ids: Sequence[int], num_tops: Sequence[int]
) -> list[TokenLogprobs]:
    """Returns each row's log-probabilities; numbers leave numpy by the column, not by the row."""
    J, most = (columns_RI.shape[1] - 2) // 2, max(num_tops)
    assert most <= J, f"{most} alternatives are wanted, but {J} come back"
    numbers_RI = columns_RI.view(np.float32)
    rows = zip(
        token_ids,
        num_tops,
        numbers_RI[:, 0].tolist(),
        columns_RI[:, 1].tolist(),
        columns_RI[:, 2 : 2 + most].tolist(),
        numbers_RI[:, 2 + J : 2 + J + most].tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            top_ids=tuple(top_ids[:num_top]),
            top_logprobs=tuple(top_logprobs[:num_top]),
        )
        for token_id, num_top, logprob, rank, top_ids, top_logprobs in rows
    ]
