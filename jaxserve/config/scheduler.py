"""`[scheduler]`: which requests run."""

from typing import Literal, Self

import pydantic

from jaxserve.config.section import Section


class SchedulerSection(Section):
    """Which requests run, and how many tokens a step computes."""

    batching: Literal["continuous", "static"] = pydantic.Field(
        "continuous", description="static: a new batch only when the last one is done (ablation)."
    )
    chunked_prefill: bool = pydantic.Field(
        True, description="Split prompts over steps, beside decoding rows."
    )
    max_seqs: int = pydantic.Field(32, ge=1, le=4096, description="Sequences running at once.")
    max_chunks: int = pydantic.Field(
        4, ge=1, le=64, description="Sequences that compute more than one token in one step."
    )
    max_step_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Token budget of a step. Unset: max_seqs + the largest chunk bucket.",
    )
    target_itl_s: float | None = pydantic.Field(
        None,
        gt=0,
        description="Time between a sequence's tokens to keep to: a step takes as many prompt "
        "tokens beside decoding rows as the step times allow. Needs chunked_prefill. Unset: all "
        "that fit.",
    )
    policy: Literal["priority", "fcfs", "edf", "fair"] = pydantic.Field(
        "priority",
        description="Who comes first: priority: the higher class, then who came first; fcfs: who "
        "came first, and classes are refused; edf: in a class, whose deadline is first, and what "
        "cannot meet its own is refused at once; fair: the tenant that has had least, by weight.",
    )
    fair_credit_tokens: int | None = pydantic.Field(
        None,
        ge=0,
        le=1 << 40,
        description="With policy fair, tokens that a tenant may have ahead of others after it used "
        "less than its share, and that others are given until it no longer counts as present. 0: "
        "nothing is saved up, and nothing is kept ready for who is present. Unset: 64 steps.",
    )
    ageing_s: float | None = pydantic.Field(
        60.0,
        gt=0,
        description="With policy priority, seconds of waiting that count as one class. Unset: a "
        "lower class waits for ever while there is a higher.",
    )
    prefix_order: bool = pydantic.Field(
        False,
        description="Among those of one class and tenant that wait, who has most of its prompt in "
        "the prefix cache starts first. Needs prefix_cache.enabled; not with policy edf.",
    )
    prefix_max_overtakes: int = pydantic.Field(
        8,
        ge=1,
        le=1_000_000,
        description="With prefix_order, times that one which waits is overtaken at most.",
    )
    max_preemptions: int = pydantic.Field(
        3,
        ge=1,
        description="Times a sequence gives its pages up; then others do, while there are any.",
    )

    @pydantic.model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.prefix_order and self.policy == "edf":
            raise ValueError(
                'prefix_order does not go with policy = "edf", which tells who can meet its '
                "deadline by the order of deadlines; set prefix_order = false or another policy"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.target_itl_s is not None and not self.chunked_prefill:
            raise ValueError(
                "target_itl_s needs chunked_prefill = true: it cuts prompts; or leave it unset"
            )
        return self
