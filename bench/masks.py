"""What grammars cost on the host: compiling one, and the masks of its tokens.

    .venv/bin/python bench/masks.py
    .venv/bin/python bench/masks.py --model path/to/a/checkpoint --tokens 300

For each form: the first compile, trial in its process included, and the next one, which is kept;
then rows that draw tokens at random under their masks, as the engine does it, one after another,
and end only where nothing but an end is left. A row's time is for its mask and for reading the
token, on this thread's processor, so other programs disturb it little; a step's is the sum over all
rows.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Collection, Set

import numpy as np

from jaxserve.checkpoint.registry import find_model
from jaxserve.errors import RequestError
from jaxserve.plan import TokenMask
from jaxserve.request import SamplingParams, StructuredOutput
from jaxserve.text.constraints import Constraint, Constraints

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "rare"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MANY = {"type": "object", "properties": {f"property_{n}": {"type": "string"} for n in range(300)}}
CHOICES = tuple(f"item number {n}" for n in range(2000))
ARITHMETIC = """start: sum
sum: product (("+" | "-") product)*
product: factor (("*" | "/") factor)*
factor: NUMBER | "(" sum ")"
NUMBER: /[0-9]+(\\.[0-9]+)?/
%ignore / /"""
FORMS = {
    "any JSON object": StructuredOutput(kind="json_object"),
    "schema, 4 properties": StructuredOutput(kind="json_schema", text=json.dumps(PERSON)),
    "schema, 300 properties": StructuredOutput(kind="json_schema", text=json.dumps(MANY)),
    "regex of digits": StructuredOutput(kind="regex", text=r"(\d{1,3}\.){3}\d{1,3}"),
    "regex of words": StructuredOutput(kind="regex", text=r"\w+( \w+){0,200}\."),
    "2,000 choices": StructuredOutput(kind="choice", choices=CHOICES),
    "arithmetic in Lark": StructuredOutput(kind="lark", text=ARITHMETIC),
    "worst: pattern": StructuredOutput(kind="regex", text="(?s:.*a.{50})"),
    "worst: ambiguous": StructuredOutput(kind="lark", text='start: start start | "a" | ""'),
}  # fmt: skip


def main() -> int:
    options = read_options()
    header = find_model(options.model).load_header()
    vocab_size = header.config.vocab_size
    constraints = Constraints(
        header.tokenizer,
        eos_ids=header.eos_ids,
        vocab_size=vocab_size,
    )
    started_s = time.monotonic()
    constraints.build(SamplingParams(), StructuredOutput(kind="regex", text="first"))
    print(f"{vocab_size} tokens; the vocabulary took {time.monotonic() - started_s:.2f} s, once")
    print(
        f"{'form':24} {'compile':>10} {'kept':>8} {'row p50':>9} {'p99':>8} {'max':>8} {'step':>9}"
    )
    for name, form in FORMS.items():
        tell(name, form, constraints, eos_ids=header.eos_ids, options=options)
    constraints.close()
    return 0


def tell(
    name: str,
    form: StructuredOutput,
    constraints: Constraints,
    *,
    eos_ids: Collection[int],
    options: argparse.Namespace,
) -> None:
    builds_s = []
    for _ in range(2):
        started_s = time.monotonic()
        first = constraints.build(SamplingParams(), form)
        builds_s.append(time.monotonic() - started_s)
    assert first is not None
    ends = frozenset(eos_ids)
    rows = [
        Row(first.fork(), seed, ends, num_words=constraints.num_words)
        for seed in range(options.rows)
    ]
    taken_s: list[float] = []
    steps_s: list[float] = []
    for _ in range(options.tokens):
        step_s = [row.step() for row in rows]
        taken_s += step_s
        if len(step_s) == options.rows:
            steps_s.append(sum(step_s))
        rows = [row for row in rows if not row.is_over]
    median, high = np.quantile(taken_s, [0.5, 0.99])
    print(
        f"{name:24} {1e3 * builds_s[0]:7.1f} ms {1e3 * builds_s[1]:5.2f} ms {1e6 * median:6.0f} µs "
        f"{1e6 * high:5.0f} µs {1e3 * max(taken_s):5.1f} ms {1e3 * np.median(steps_s):6.2f} ms"
    )


class Row:
    """One output that is drawn at random."""

    def __init__(
        self, constraint: Constraint, seed: int, eos_ids: Set[int], *, num_words: int
    ) -> None:
        self._constraint = constraint
        self._random = random.Random(seed)
        self._eos_ids = eos_ids
        self._mask: TokenMask = np.zeros(num_words, np.uint32)
        self._output: list[int] = []
        self.is_over = False

    def step(self) -> float:
        """Returns the seconds of this thread's processor that a token took."""
        started_s = time.thread_time()
        try:
            self._constraint.read(self._output)
            self._constraint.fill(self._mask)
            mask_s = time.thread_time() - started_s
            self._constraint.charge(mask_s)
        except RequestError:  # it costs more than it may
            self.is_over = True
            return time.thread_time() - started_s
        self._output.append(self._draw(self._mask))
        return mask_s

    def _draw(self, mask: TokenMask) -> int:
        ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        while True:
            token_id = int(ids[self._random.randrange(len(ids))])
            if token_id not in self._eos_ids:
                return token_id
            if len(ids) <= len(self._eos_ids):
                self.is_over = True
                return token_id


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose vocabulary it is")
    parser.add_argument("--rows", type=int, default=32, help="at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each row")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
