"""Who is asked in which round, and what becomes of a peer that fails."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.peer.absent import Absent
from bench.peer.batches import rotate, run_round, still_measured
from bench.peer.process import Peer, group_of
from bench.peer.report import Findings, Sample
from bench.peer.setup import ROOT
from bench.peer.variants import OURS, Variant, build_variants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
ADAPTER = """
import os
from bench.peer.adapters.worker import serve_orders

def start(options):
    print("a library speaks")
    def generate(prompts, num_tokens):
        if options.get("dies"):
            os._exit(3)
        print("and speaks")
        return [[len(prompt)] * (num_tokens - options.get("lacks", 0)) for prompt in prompts]
    return generate, {"fake": "1"}

serve_orders(start)
"""
StartFake = Callable[[str], Peer]


@pytest.fixture
def start_fake(tmp_path: Path) -> Iterator[StartFake]:
    with contextlib.ExitStack() as stack:

        def start(options: str) -> Peer:
            path = tmp_path / "log"
            log = stack.enter_context(path.open("w"))
            command = [sys.executable, "-c", ADAPTER, options]
            process = stack.enter_context(group_of(command, env={}, cwd=ROOT, log=log, asked=True))
            return Peer(process, path)

        yield start


def variant(name: str, better_of: str = "") -> Variant:
    return Variant(name=name, engine="jaxserve", options={}, better_of=better_of)


def sample(name: str, seconds: float, num_seqs: int = 8) -> Sample:
    return Sample(
        variant=name, num_seqs=num_seqs, round=0, seconds=seconds, num_tokens=1, others=0.0
    )


def test_a_peer_answers_though_its_library_prints(start_fake: StartFake) -> None:
    peer = start_fake("{}")
    assert peer.versions == {"fake": "1"}
    assert peer.start_peak_bytes > 0
    run = peer.generate([[5, 6], [7]], 3)
    assert run.output_ids == [[2, 2, 2], [1, 1, 1]]
    assert peer.generate([[5]], 1).output_ids == [[1]]


def test_too_few_tokens_are_no_measurement(start_fake: StartFake) -> None:
    with pytest.raises(Absent, match=r"gave \[2\] tokens where 3"):
        start_fake('{"lacks": 1}').generate([[5]], 3)


def test_one_that_stands_still_ends_with_whoever_started_it(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from bench.peer.process import Peer, group_of
path = Path({str(tmp_path / "log")!r})
command = [sys.executable, "-c", {ADAPTER!r}, "{{}}"]
with group_of(command, env={{}}, cwd=Path("."), log=path.open("w"), asked=True) as process:
    Peer(process, path)
    print(process.pid, flush=True)
    os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    stat = Path(f"/proc/{done.stdout.strip()}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)


def test_one_that_dies_ends_only_itself(start_fake: StartFake) -> None:
    variants = [variant("dies"), variant(OURS)]
    peers = {"dies": start_fake('{"dies": true}'), OURS: start_fake("{}")}
    found = Findings()
    run_round(variants, peers, [[5], [6]], 0, 4, found)
    assert set(peers) == {OURS}
    assert found.absent["dies"].startswith("died: ")
    assert [(one.variant, one.num_seqs, one.num_tokens) for one in found.samples] == [(OURS, 2, 4)]
    assert found.first_tokens == {OURS: [True, True]}


def test_of_two_float_types_the_faster_goes_on() -> None:
    variants = [variant("a bf16", "a"), variant("a f32", "a"), variant("b")]
    assert still_measured(variants, [], 8) == variants
    samples = [sample("a bf16", 2.0), sample("a f32", 1.0), sample("b", 9.0)]
    assert [one.name for one in still_measured(variants, samples, 8)] == ["a f32", "b"]
    assert still_measured(variants, samples, 32) == variants


def test_each_round_another_one_begins() -> None:
    variants = [variant(name) for name in "abc"]
    assert ["".join(one.name for one in rotate(variants, count)) for count in range(4)] == [
        "abc", "bca", "cab", "abc",
    ]  # fmt: skip


def test_every_variant_has_a_name_of_its_own_and_ours_is_among_them(tmp_path: Path) -> None:
    names = [one.name for one in build_variants(tmp_path, max_seqs=32)]
    assert OURS in names
    assert len(set(names)) == len(names)
