"""This engine against HF `generate`, in turn, in one run: same weights, 128 tokens in, 128 out.

For each batch size and dtype the two sides alternate, and medians are printed; the ratio takes the
better dtype of each side. Machines are noisy: read the ratio, not the seconds.

    .venv/bin/python bench/vs_transformers.py --peer-python PATH-TO-A-VENV/bin/python

The peer's venv needs: torch transformers accelerate gguf (`scripts/judges/greedy` makes one).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from jaxserve import LLM
from jaxserve.checkpoint.registry import find_model
from jaxserve.config import load_config
from jaxserve.request import SamplingParams

PROMPT_LEN = NUM_TOKENS = 128
DTYPES = ("float32", "bfloat16")
EXPECTED = {1: 1.5, 8: 1.5, 32: 2.0}


class Peer:
    """The other process; one order at a time."""

    def __init__(self, python: Path, gguf_path: Path) -> None:
        script = Path(__file__).with_name("transformers_peer.py")
        self._process = subprocess.Popen(
            [python, script, gguf_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.versions = self._read()

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("vs_transformers: the peer died; run bench/transformers_peer.py by hand")
        answer: dict[str, object] = json.loads(line)
        return answer

    def run(self, dtype: str, prompts: list[list[int]]) -> float:
        order = {"dtype": dtype, "prompts": prompts, "num_tokens": NUM_TOKENS}
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return float(str(self._read()["seconds"]))


def run_ours(llm: LLM, prompts: list[list[int]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    start = time.perf_counter()
    completions = llm.generate([tuple(prompt) for prompt in prompts], params)
    seconds = time.perf_counter() - start
    assert all(len(done.token_ids) == NUM_TOKENS for done in completions)
    return seconds


def make_prompts(llm: LLM, batch: int) -> list[list[int]]:
    """Returns distinct windows of English that every CPython carries."""
    from pydoc_data import topics

    ids = llm.tokenizer.encode(" ".join(sorted(topics.topics.values()))[: 12 * PROMPT_LEN * 40])
    return [ids[i * PROMPT_LEN : (i + 1) * PROMPT_LEN] for i in range(batch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every sample here")
    arguments = parser.parse_args()

    peer = Peer(arguments.peer_python, find_model("smollm2-135m-instruct").path)
    print(f"peer: {peer.versions}")
    llms = {
        dtype: LLM(
            config=load_config(
                flags={
                    "model.dtype": dtype,
                    "model.max_model_tokens": 512,
                    "scheduler.max_seqs": max(arguments.batch),
                }
            )
        )
        for dtype in DTYPES
    }
    samples: list[dict[str, object]] = []
    print(f"{'batch':>5} {'side':>13} " + " ".join(f"{dtype + ' tok/s':>15}" for dtype in DTYPES))
    for batch in arguments.batch:
        prompts = make_prompts(llms["float32"], batch)
        times: dict[tuple[str, str], list[float]] = {}
        for round_ in range(arguments.rounds + 1):
            for dtype in DTYPES:
                for side, seconds in (
                    ("jaxserve", run_ours(llms[dtype], prompts)),
                    ("transformers", peer.run(dtype, prompts)),
                ):
                    if round_ > 0:  # the first is warm-up
                        times.setdefault((side, dtype), []).append(seconds)
                        samples.append(
                            {"batch": batch, "side": side, "dtype": dtype, "seconds": seconds}
                        )
        medians = {key: statistics.median(values) for key, values in times.items()}
        best = {}
        for side in ("jaxserve", "transformers"):
            rates = [batch * NUM_TOKENS / medians[side, dtype] for dtype in DTYPES]
            best[side] = max(rates)
            print(f"{batch:>5} {side:>13} " + " ".join(f"{rate:>15.1f}" for rate in rates))
        ratio = best["jaxserve"] / best["transformers"]
        expected = f"expected ≥ {EXPECTED[batch]}" if batch in EXPECTED else "no expectation"
        print(f"{batch:>5} {'ratio':>13} {ratio:>15.2f} ({expected})")
    for llm in llms.values():
        llm.close()
    if arguments.json:
        arguments.json.write_text(json.dumps({"peer": peer.versions, "samples": samples}, indent=1))


if __name__ == "__main__":
    main()
