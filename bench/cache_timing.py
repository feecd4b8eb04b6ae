"""Whether a tenant can tell by its time to first token what another has asked.

    python -m bench.cache_timing
    python -m bench.cache_timing --samples 40

A sample is two requests, one after the other: the first tenant asks a prompt, then the second asks
the same one (`asked`), or one that nobody ever asked (`fresh`); which of the two is drawn for each
sample. Prompts are new in every sample. The two arms' times are compared by Kolmogorov and
Smirnov's test of two samples.

Wanted: with namespaces as they are by default the test does not reject at 0.01; where the operator
lets the two tenants share, it rejects at p < 1e-6, so that it can see what is to be seen.
"""

import argparse
import bisect
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from bench.replays import LiveMachine, add_machine_options, change, read_seed, read_settings
from jaxserve.engine import Delta, Engine
from jaxserve.request import GenerationRequest, SamplingParams

Arm = Literal["asked", "fresh"]
ARMS: Final[tuple[Arm, ...]] = ("asked", "fresh")
FIRST, SECOND = "first", "second"
ONE_TOKEN: Final = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
NOT_REJECTED, REJECTED = 0.01, 1e-6
WARM_UP: Final = 10  # samples, left out


def main() -> int:
    options = read_options()
    rng = random.Random(read_seed(options))
    config = read_settings(options)
    shared = change(config, "prefix_cache", shared_namespaces={"both": (FIRST, SECOND)})
    machine = LiveMachine(options.model, config)
    print("ttft of the second tenant, ms, by whether the first asked the same before it")
    print(f"{'':>10}{'samples':>9}{'asked p50':>11}{'fresh p50':>11}{'ratio':>7}{'D':>7}{'p':>10}")
    p_values = []
    for name, used in (("apart", config), ("shared", shared)):
        engine = machine.start(used)
        try:
            times_s = measure(engine, rng, options)
        finally:
            engine.stop()
        p_values.append(tell(name, times_s))
    apart, together = p_values
    print(f"apart: p = {apart:.3g} (wanted: at least {NOT_REJECTED:g})")
    print(f"shared: p = {together:.3g} (wanted: below {REJECTED:g})")
    return 0 if apart >= NOT_REJECTED and together < REJECTED else 1


def measure(
    engine: Engine, rng: random.Random, options: argparse.Namespace
) -> Mapping[Arm, Sequence[float]]:
    """Returns the second tenant's seconds to its token, by arm."""
    times_s: dict[Arm, list[float]] = {arm: [] for arm in ARMS}
    arms = [arm for arm in ARMS for _ in range(options.samples)]
    rng.shuffle(arms)
    special = engine.tokenizer.special_ids | engine.model.eos_ids
    plain = [id for id in range(engine.model.vocab_size) if id not in special]
    for number, arm in enumerate([*arms[:WARM_UP], *arms]):
        asked, fresh = (tuple(rng.choices(plain, k=options.prompt_tokens)) for _ in ARMS)
        ask(engine, asked, tenant=FIRST)
        taken_s = ask(engine, asked if arm == "asked" else fresh, tenant=SECOND)
        if number >= WARM_UP:
            times_s[arm].append(taken_s)
    return times_s


def ask(engine: Engine, prompt: tuple[int, ...], *, tenant: str) -> float:
    """Returns the seconds to the first token."""
    request = GenerationRequest(prompt=prompt, sampling=ONE_TOKEN, tenant=tenant)
    sent_s, first_s = time.perf_counter(), math.nan
    with engine.submit(request) as stream:
        for event in stream:
            if isinstance(event, Delta) and math.isnan(first_s):
                first_s = time.perf_counter()
    return first_s - sent_s


def tell(name: str, times_s: Mapping[Arm, Sequence[float]]) -> float:
    """Prints a row; returns the test's p."""
    asked, fresh = times_s["asked"], times_s["fresh"]
    distance, p = compare(asked, fresh)
    medians = [1e3 * statistics.median(arm) for arm in (asked, fresh)]
    print(
        f"{name:>10}{len(asked):>9}{medians[0]:>11.1f}{medians[1]:>11.1f}"
        f"{medians[0] / medians[1]:>7.2f}{distance:>7.3f}{p:>10.3g}",
        flush=True,
    )
    return p


def compare(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Returns the largest distance of two samples' distribution functions, and how likely one at
    least as large is if both are of one distribution, by Kolmogorov's limit for large samples.

    N. V. Smirnov, Table for estimating the goodness of fit of empirical distributions, 1948.
    """
    one, two = sorted(left), sorted(right)
    distance = max(
        abs(bisect.bisect_right(one, at) / len(one) - bisect.bisect_right(two, at) / len(two))
        for at in (*one, *two)
    )
    scaled = distance * math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    if scaled < 0.2:  # the sum below converges slowly there, and is 1 to twelve digits
        return distance, 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return distance, min(1.0, max(0.0, 2 * sum(terms)))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_timing",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_machine_options(parser)
    parser.add_argument("--samples", type=int, default=300, help="of each arm")
    parser.add_argument("--prompt-tokens", type=int, default=65, help="of a prompt")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
