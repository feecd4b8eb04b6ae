"""lm-eval's view of a server against HF transformers on the same weights: `scripts/judges/lm_eval`.

The part `ours` writes tasks and a tokenizer's folder; `compare`, under an interpreter with
transformers, computes each sample anew and says where they differ.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.judges.checks import Checks

PERPLEXITY_TOLERANCE = 1e-3  # absolute: the issue's own
LOGPROB_TOLERANCE = 1e-3  # of a continuation: float32 sums in two orders
TIE_MARGIN = 1e-3  # a difference of greedy text is excused only where the top-2 gap is below this
LOGITS_ROWS = 256  # computed at a time, since a row is a whole vocabulary
MAX_GEN_TOKS = 24
RUNS = ("whole", "windows")
QUESTIONS = (
    ("Which planet is known as the red planet?", ("Venus", "Mars", "Jupiter", "Mercury"), 1),
    ("What do bees make?", ("honey", "milk", "cheese", "paper clips"), 0),
    ("How many days are there in a week?", ("five", "nine", "seven", "twelve"), 2),
    ("What is the capital of Italy?", ("Paris", "Madrid", "Athens", "Rome"), 3),
    ("What is ice?", ("frozen water", "a kind of stone", "hot air", "molten iron"), 0),
    ("Which animal says moo?", ("the cat", "the cow", "the goldfish", "the bee"), 1),
    ("Wie heißt die Hauptstadt von Österreich?", ("Wien", "Köln", "Zürich", "Łódź"), 0),
    ("Which of these is a verb?", ("to run", "a table", "green", "🌶️"), 0),
)
BEGINNINGS = (
    "The capital of France is",
    "Question: What is the largest ocean?\nAnswer:",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time, there was a small robot who",
    "def add(a, b):\n    return",
    "Die Katze sitzt auf dem",
)


def write_tasks(folder: Path, text: Path) -> None:
    """Writes tasks for lm-eval with their data, and the served model's tokenizer."""
    from jaxserve.checkpoint.registry import find_model

    tokenizer = find_model("smollm2-135m-instruct").load_header().tokenizer
    tasks = folder / "tasks"
    for path in (tasks, folder / "tokenizer"):
        path.mkdir()
    for name, content in tokenizer.as_files().items():
        if name == "tokenizer_config.json":
            settings = json.loads(content) | {"tokenizer_class": "PreTrainedTokenizerFast"}
            content = json.dumps(settings)
        (folder / "tokenizer" / name).write_text(content)
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity")],
    }
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm")],
    }
    until = {
        "output_type": "generate_until",
        "doc_to_text": "{{beginning}}",
        "doc_to_target": "",
        "generation_kwargs": {
            "until": ["\n", "."],
            "max_gen_toks": MAX_GEN_TOKS,
            "do_sample": False,
        },
        "metric_list": [{"metric": "exact_match"}],
    }
    documents: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
        "rolling": (rolling, [{"text": text.read_text()}]),
        "choice": (choice, [dict(zip(("question", "choices", "answer"), row, strict=True))
                            for row in QUESTIONS]),
        "until": (until, [{"beginning": text} for text in BEGINNINGS]),
    }  # fmt: skip
    for name, (task, rows) in documents.items():
        data = tasks / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task |= {
            "task": f"judge_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (tasks / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML too


class Reference:
    """HF transformers with the weights of a GGUF file, in float32 on the CPU."""

    def __init__(self, gguf_path: Path) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder = {"pretrained_model_name_or_path": gguf_path.parent, "gguf_file": gguf_path.name}
        self._torch = torch
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(**folder)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            **folder, dtype=torch.float32
        )
        self.versions = f"transformers {transformers.__version__}"

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def score(self, ids: list[int], num_scored: int) -> tuple[float, bool, float]:
        """Returns the log-likelihood of the last ids, whether each is the likeliest, and the
        smallest gap between the two likeliest."""
        torch = self._torch
        total, is_greedy, gap = 0.0, True, math.inf
        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([ids[:-1]])).last_hidden_state[0, -num_scored:]
            for begin in range(0, num_scored, LOGITS_ROWS):
                logits = self._model.lm_head(hidden[begin : begin + LOGITS_ROWS])
                wanted = torch.tensor(ids[len(ids) - num_scored :][begin : begin + LOGITS_ROWS])
                top = torch.topk(logits, 2)
                is_greedy &= bool((top.indices[:, 0] == wanted).all())
                gap = min(gap, float((top.values[:, 0] - top.values[:, 1]).min()))
                # torch's own sum over a vocabulary in float32 is off by 1e-5, always to one side
                logprobs = torch.log_softmax(logits.double(), -1).gather(1, wanted[:, None])
                total += float(logprobs.sum())
        return total, is_greedy, gap

    def score_text(self, text: str, window: int) -> tuple[float, int]:
        """Returns the log-likelihood of a text after BOS, in windows that are scored once each.

        window 4, 6 tokens    BOS a b c d      the first: all after BOS
                              b c d [e f]      the last: as much before it as there is room
        """
        tokens = self.encode(text)
        total, num_done = 0.0, 0
        while num_done < len(tokens):
            end = min(num_done + window, len(tokens))
            ids = [self._tokenizer.bos_token_id, *tokens][max(end - window, 0) : end + 1]
            total += self.score(ids, end - num_done)[0]
            num_done = end
        return total, len(tokens)

    def write(self, prompt: str, until: list[str], max_tokens: int) -> tuple[str, float]:
        """Returns greedy text up to a stop, and the smallest gap between the two likeliest."""
        torch = self._torch
        ids = torch.tensor([self.encode(prompt)])
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=self._tokenizer.eos_token_id,
                repetition_penalty=1.0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tops = [torch.topk(step[0], 2).values for step in out.logits]
        text = self._tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
        cut = min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))
        return text[:cut], min(float(top[0] - top[1]) for top in tops)


def compare(folder: Path, gguf_path: Path) -> int:
    """Prints each sample of lm-eval's runs that is not the reference's; returns the exit code."""
    reference = Reference(gguf_path)
    checks = Checks(f"lm-eval through HTTP against {reference.versions}")
    scores = list(_score_choices(reference, folder))
    texts = list(_write_texts(reference, folder))
    for run in RUNS:
        (results,) = folder.glob(f"{run}/*/results_*.json")
        arguments = json.loads(results.read_text())["config"]["model_args"]
        # one of its tokens is for BOS, one for what has to be generated
        window = int(arguments["max_length"]) - 2
        for sample in _read_samples(folder, run, "rolling"):
            total, num_tokens = reference.score_text(sample["doc"]["text"], window)
            ours = math.exp(-float(sample["resps"][0][0]) / num_tokens)
            wanted = math.exp(-total / num_tokens)
            checks.holds(
                f"{run}: perplexity of {num_tokens} tokens",
                abs(ours - wanted) <= PERPLEXITY_TOLERANCE,
                f"{ours:.6f}, HF {wanted:.6f}, difference {ours - wanted:.1e}",
            )
        _compare_choices(checks, scores, folder, run)
        _compare_texts(checks, texts, folder, run)
    return checks.end()


def _score_choices(reference: Reference, folder: Path) -> Iterator[tuple[float, bool, float]]:
    for sample in _read_samples(folder, RUNS[0], "choice"):
        for asked in sample["arguments"].values():
            ids = reference.encode(asked["arg_0"] + asked["arg_1"])
            yield reference.score(ids, len(ids) - len(reference.encode(asked["arg_0"])))


def _write_texts(reference: Reference, folder: Path) -> Iterator[tuple[str, float]]:
    for sample in _read_samples(folder, RUNS[0], "until"):
        (asked,) = sample["arguments"].values()
        settings = asked["arg_1"]
        yield reference.write(asked["arg_0"], settings["until"], settings["max_gen_toks"])


def _compare_choices(
    checks: Checks, scores: Sequence[tuple[float, bool, float]], folder: Path, run: str
) -> None:
    replies = [
        reply for sample in _read_samples(folder, run, "choice") for reply in sample["resps"]
    ]
    differences: list[float] = []
    ties: list[tuple[float, float]] = []
    wrong: list[tuple[float, float]] = []
    for ((logprob, is_greedy),), (total, wanted, gap) in zip(replies, scores, strict=True):
        differences.append(abs(float(logprob) - total))
        if (is_greedy == "True") != wanted:
            (ties if gap < TIE_MARGIN else wrong).append((total, gap))
    worst = max(differences)
    checks.holds(
        f"{run}: log-likelihood of {len(scores)} choices",
        worst <= LOGPROB_TOLERANCE,
        f"largest difference {worst:.1e}",
    )
    num_greedy = sum(wanted for _, wanted, _ in scores)
    seen = f"{num_greedy} are, {len(ties)} ties, wrong {wrong}"
    checks.holds(f"{run}: which of them are greedy", not wrong and num_greedy, seen)


def _compare_texts(
    checks: Checks, texts: Sequence[tuple[str, float]], folder: Path, run: str
) -> None:
    num_equal = 0
    ties: list[tuple[str, str, float]] = []
    wrong: list[tuple[str, str, float]] = []
    samples = _read_samples(folder, run, "until")
    for sample, (text, gap) in zip(samples, texts, strict=True):
        ours = sample["resps"][0][0]
        if ours == text:
            num_equal += 1
        else:
            (ties if gap < TIE_MARGIN else wrong).append((ours, text, gap))
    seen = f"{num_equal} equal, ties {ties}, wrong {wrong}"
    checks.holds(f"{run}: greedy text until a stop", not wrong and num_equal, seen)


def _read_samples(folder: Path, run: str, task: str) -> Iterator[dict[str, Any]]:
    (path,) = folder.glob(f"{run}/*/samples_judge_{task}_*.jsonl")
    for line in path.read_text().splitlines():
        yield json.loads(line)


def main() -> int:
    part, folder, path = sys.argv[1], *map(Path, sys.argv[2:])
    if part == "compare":
        return compare(folder, path.resolve())
    write_tasks(folder, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
