"""Greedy tokens of the demo model: this engine against HF transformers and llama.cpp, in float32.

Each part runs under the interpreter that has what it needs; `scripts/judges/greedy` runs them all.
The peers read the same GGUF through their own loaders, so weights, layouts, tokenizer and
arithmetic are all theirs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

NUM_TOKENS = 48
TIE_MARGIN = 1e-3  # a difference is excused only where the reference's top-2 gap is below this
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a small robot who",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Water boils at 100 degrees",
    "In 1969, Neil Armstrong",
    "SELECT name, age FROM users WHERE",
    "Dear hiring committee,\n\nI am writing to",
    "Roses are red,",
    "1, 1, 2, 3, 5, 8, 13,",
    "Question: What is the largest planet?\nAnswer:",
    "La vie est belle parce que",
    "Photosynthesis is the process by which",
    "The recipe needs two eggs, a cup of flour and",
    '{"name": "Ada", "born": 1815, "field":',
    "import numpy as np\n\nx = np.",
    "He opened the door slowly, and behind it",
    "Gravity is weaker than the other forces because",
    "Alle Menschen sind frei und gleich an",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)


def write_f32_gguf(source: Path, target: Path) -> None:
    """Writes the same model with every tensor dequantized to F32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            name, field.contents(), field.types[0], sub_type=field.types[-1] if is_array else None
        )
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_transformers(gguf_path: Path) -> list[dict[str, list[float] | list[int]]]:
    """Returns ids and top-2 gaps of HF transformers, float32, eager attention."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = {"pretrained_model_name_or_path": gguf_path.parent, "gguf_file": gguf_path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(**folder, dtype=torch.float32)
    runs = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            out = model.generate(
                prompt_ids,
                attention_mask=torch.ones_like(prompt_ids),
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
                eos_token_id=None,
                repetition_penalty=1.0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        top2 = [torch.topk(step[0].float(), 2).values for step in out.logits]
        runs.append(
            {
                "prompt_ids": prompt_ids[0].tolist(),
                "output_ids": out.sequences[0, prompt_ids.shape[1] :].tolist(),
                "gaps": [float(pair[0] - pair[1]) for pair in top2],
            }
        )
    return runs


def run_llamacpp(
    gguf_path: Path, prompts: Sequence[str] = PROMPTS, *, add_bos: bool = False
) -> list[dict[str, list[float] | list[int]]]:
    """Returns ids and top-2 gaps of llama.cpp, F32 weights and F32 KV."""
    import llama_cpp
    import numpy as np

    llama = llama_cpp.Llama(
        str(gguf_path),
        n_ctx=1024,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
        logits_all=False,
        verbose=False,
    )
    runs = []
    for prompt in prompts:
        ids = llama.tokenize(prompt.encode(), add_bos=add_bos, special=True)
        llama.reset()
        llama.eval(ids)
        output_ids: list[int] = []
        gaps: list[float] = []
        for _ in range(NUM_TOKENS):
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(llama.ctx, -1), shape=(llama.n_vocab(),)
            )
            first, second = np.argsort(logits)[-1:-3:-1]
            output_ids.append(int(first))
            gaps.append(float(logits[first] - logits[second]))
            llama.eval([int(first)])
        runs.append({"prompt_ids": ids, "output_ids": output_ids, "gaps": gaps})
    return runs


def run_jaxserve(
    gguf_path: Path, prompts: Sequence[str] = PROMPTS
) -> list[dict[str, list[float] | list[int]]]:
    """Returns ids of this engine, float32, all prompts in one continuous batch."""
    from jaxserve import LLM
    from jaxserve.config import load_config
    from jaxserve.request import SamplingParams

    config = load_config(flags={"model.dtype": "float32", "model.max_model_tokens": 1024})
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(gguf_path), config) as llm:
        completions = llm.generate(list(prompts), params)
        encode = llm.tokenizer.encode
        return [
            {"prompt_ids": encode(prompt), "output_ids": list(done.token_ids), "gaps": []}
            for prompt, done in zip(prompts, completions, strict=True)
        ]


def compare(ours_path: Path, peer_path: Path) -> int:
    """Prints where two runs differ; returns how many differences no tie excuses."""
    ours, peer = (json.loads(path.read_text()) for path in (ours_path, peer_path))
    faults = ties = 0
    for i, (a, b) in enumerate(zip(ours, peer, strict=True)):
        if a["prompt_ids"] != b["prompt_ids"]:
            faults += 1
            print(f"prompt {i}: the prompt's ids differ: {a['prompt_ids']} {b['prompt_ids']}")
        elif a["output_ids"] != b["output_ids"]:
            pairs = enumerate(zip(a["output_ids"], b["output_ids"], strict=True))
            at = next(j for j, (x, y) in pairs if x != y)
            is_tie = b["gaps"][at] < TIE_MARGIN
            ties, faults = ties + is_tie, faults + (not is_tie)
            print(f"prompt {i}: differs at token {at}, gap {b['gaps'][at]:.2e}, tie={is_tie}")
    same = len(ours) - faults - ties
    print(f"{ours_path.stem} against {peer_path.stem}: {same} equal, {ties} ties, {faults} faults")
    return faults


def main() -> int:
    runs = {"transformers": run_transformers, "llamacpp": run_llamacpp, "jaxserve": run_jaxserve}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["f32-gguf", *runs, "compare"])
    parser.add_argument("paths", nargs=2, type=Path, help="GGUF and output; or two outputs")
    arguments = parser.parse_args()
    first, second = (path.resolve() for path in arguments.paths)
    match arguments.part:
        case "f32-gguf":
            write_f32_gguf(first, second)
        case "compare":
            return int(compare(first, second) > 0)
        case part:
            second.write_text(json.dumps(runs[part](first)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
