"""OpenVINO GenAI's ContinuousBatchingPipeline, on token ids."""

from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peer.adapters.worker import Generate, Prompts, num_threads, serve_orders


def start(options: dict[str, Any]) -> tuple[Generate, dict[str, str]]:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = options["max_seqs"]
    for name, value in options.get("scheduler", {}).items():
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        options["model"],
        scheduler,
        "CPU",
        {"INFERENCE_PRECISION_HINT": options["precision"], "INFERENCE_NUM_THREADS": num_threads()},
    )

    def generate(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(ids, [config] * len(ids))
        return [result.m_generation_ids[0] for result in results]

    return generate, {"openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    serve_orders(start)
