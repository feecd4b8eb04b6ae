"""The shapes of a configuration's steps, for who plans steps without a device."""

from jaxserve.config import Config
from jaxserve.plan import Bucket, StepLimits


def find_shapes(
    config: Config, *, max_model_tokens: int, min_rows: int
) -> tuple[StepLimits, tuple[Bucket, ...]]:
    """Returns the largest step and the forward programs, as a runner would have them.

    Args:
      min_rows: as `runner.buckets.build_scheme`.

    Raises:
      ConfigError: sizes that contradict each other.
    """
    from jaxserve.runner.buckets import build_scheme  # here: it brings jax

    scheme = build_scheme(config, max_model_tokens=max_model_tokens, min_rows=min_rows)
    return scheme.limits, scheme.forwards
