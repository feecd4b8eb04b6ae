"""Batches of all variants in turn, same prompts: one process at work, the others standing still."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.peer import report
from bench.peer.absent import Absent
from bench.peer.process import Peer, group_of
from bench.peer.report import Findings, Sample
from bench.peer.setup import ROOT, Environment, Setup
from bench.peer.variants import ADAPTERS, OURS, Engine, Variant

PROMPT_LEN: Final = 128
WARM_UP_TOKENS: Final = 4
Prompts = list[list[int]]


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
      all_seqs: numbers of sequences, each measured in every round.
      num_tokens: of each output.
    """

    rounds: int
    all_seqs: Sequence[int]
    num_tokens: int


class PromptSource:
    """English that every CPython carries, each window of it given out once."""

    def __init__(self, tokenizer_file: Path) -> None:
        from pydoc_data import topics

        from tokenizers import Tokenizer

        text = " ".join(sorted(topics.topics.values()))
        self._ids: list[int] = Tokenizer.from_file(str(tokenizer_file)).encode(text).ids
        self._at = 0

    def take(self, count: int) -> Prompts:
        """Returns so many prompts; after the last window of the text the first comes again."""
        prompts = []
        for _ in range(count):
            if self._at + PROMPT_LEN > len(self._ids):
                self._at = 0
            prompts.append(self._ids[self._at : self._at + PROMPT_LEN])
            self._at += PROMPT_LEN
        return prompts


def measure_batches(
    variants: Sequence[Variant],
    environments: Mapping[Engine, Environment],
    setup: Setup,
    plan: Plan,
    found: Findings,
) -> None:
    """Starts all, and asks them in turn."""
    source = PromptSource(setup.weights / "hf" / "tokenizer.json")
    with contextlib.ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for variant in variants:
            try:
                peers[variant.name] = start(variant, environments[variant.engine], setup, stack)
                for num_seqs in plan.all_seqs:
                    peers[variant.name].generate(source.take(num_seqs), WARM_UP_TOKENS)
            except Absent as absent:
                leave_out(variant.name, absent, peers, found)
                continue
            peer = peers[variant.name]
            found.versions[variant.name] = peer.versions
            print(f"started {variant.name} in {peer.start_s:.0f} s: {peer.versions}", flush=True)
        for round_ in range(plan.rounds):
            for num_seqs in plan.all_seqs:
                prompts = source.take(num_seqs)
                run_round(variants, peers, prompts, round_, plan.num_tokens, found)
        for name, peer in peers.items():
            found.memory[name] = peer.start_peak_bytes, peer.peak_bytes()


def start(
    variant: Variant, environment: Environment, setup: Setup, stack: contextlib.ExitStack
) -> Peer:
    log_path = setup.log(variant.name)
    log = stack.enter_context(log_path.open("w"))
    command: list[str | Path] = [
        environment.python, "-m", ADAPTERS[variant.engine], json.dumps(variant.options),
    ]  # fmt: skip
    process = stack.enter_context(
        group_of(command, env=environment.env, cwd=ROOT, log=log, asked=True)
    )
    return Peer(process, log_path)


def leave_out(name: str, absent: Absent, peers: dict[str, Peer], found: Findings) -> None:
    peers.pop(name, None)
    found.absent[name] = str(absent)
    print(f"absent: {name}: {absent}", flush=True)


def run_round(
    variants: Sequence[Variant],
    peers: dict[str, Peer],
    prompts: Prompts,
    round_: int,
    num_tokens: int,
    found: Findings,
) -> None:
    """Asks every variant that is still measured at this size; each round another one begins."""
    num_seqs = len(prompts)
    first_ids: dict[str, list[int]] = {}
    for variant in rotate(still_measured(variants, found.samples, num_seqs), round_):
        if variant.name not in peers:
            continue
        try:
            run = peers[variant.name].generate(prompts, num_tokens)
        except Absent as absent:
            leave_out(variant.name, absent, peers, found)
            continue
        first_ids[variant.name] = [ids[0] for ids in run.output_ids]
        sample = Sample(
            variant=variant.name, num_seqs=num_seqs, round=round_, seconds=run.seconds,
            num_tokens=num_tokens, others=run.others,
        )  # fmt: skip
        found.samples.append(sample)
        print(
            f"round {round_ + 1} {num_seqs:>3} seqs {variant.name:<26} "
            f"{sample.tokens_per_s:>7.1f} tokens/s"
            + (f", others {100 * run.others:.0f} %" if run.others > report.NOISY else ""),
            flush=True,
        )
    for name, ids in first_ids.items():
        if OURS in first_ids:
            same = [a == b for a, b in zip(ids, first_ids[OURS], strict=True)]
            found.first_tokens.setdefault(name, []).extend(same)


def still_measured(
    variants: Sequence[Variant], samples: Sequence[Sample], num_seqs: int
) -> list[Variant]:
    """Returns the variants without those that another of their kind has beaten at this size."""
    medians = report.find_medians(samples)
    best: dict[str, float] = {}
    for variant in variants:
        if variant.better_of:
            rate = medians.get((variant.name, num_seqs), 0.0)
            best[variant.better_of] = max(rate, best.get(variant.better_of, 0.0))
    return [
        variant
        for variant in variants
        if not variant.better_of
        or medians.get((variant.name, num_seqs), 0.0) == best[variant.better_of]
    ]


def rotate(variants: Sequence[Variant], count: int) -> list[Variant]:
    at = count % len(variants) if variants else 0
    return [*variants[at:], *variants[:at]]
