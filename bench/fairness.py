"""What one tenant feels of another that sends ten times its share, in the simulator.

    python bench/fairness.py
    python bench/fairness.py --policy fair --num-requests 3000 --only two

Each scenario is run twice, with the same requests of all but the last tenant: first that one sends
just its share of the machine, then ten times as much. `ratio` is what the first tenant's p99 TTFT
grew by. Times are virtual, of a device made up in `jaxserve/measure/fairness.py`.
"""

import argparse
import dataclasses

from jaxserve.measure.fairness import SCENARIOS, build_machine, compare_flood


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", action="append", metavar="P", help="(default: fair, fcfs)")
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="in the name")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args()
    print("p99 TTFT of the first tenant, ms; tokens/s of all; preemptions in the flood")
    print(f"{'scenario':22} {'policy':8} {'share':>8} {'flood':>8} {'ratio':>6} ", end="")
    print(f"{'tokens/s':>9} {'flood':>7} {'preempted':>9}")
    for scenario in SCENARIOS:
        if options.only and not any(text in scenario.name for text in options.only):
            continue
        sized = dataclasses.replace(scenario, num_requests=options.num_requests, seed=options.seed)
        for policy in options.policy or ("fair", "fcfs"):
            found = compare_flood(sized, build_machine(policy))
            share, flood = found.share, found.flood
            print(
                f"{scenario.name:22} {policy:8} {1e3 * share.ttft_s:8.0f} "
                f"{1e3 * flood.ttft_s:8.0f} {found.ratio:6.2f} {share.tokens_per_s:9.0f} "
                f"{flood.tokens_per_s:7.0f} {flood.preemptions:9}",
                flush=True,
            )


if __name__ == "__main__":
    main()
