"""What VllmEngine tells of the model, the server and its load."""

import datetime
import json
from typing import Final

from smg_grpc_proto import vllm_engine_pb2

import jaxserve
from jaxserve.engine import Engine, EngineState
from jaxserve.server.load import Load

SERVER_TYPE: Final = "jaxserve"
# Those that a gateway may fill in for its clients.
DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def build_health(engine: Engine | None) -> vllm_engine_pb2.HealthCheckResponse:
    """Returns whether requests are accepted.

    Args:
      engine: None while it is being loaded.
    """
    state = EngineState.STARTING if engine is None else engine.state
    return vllm_engine_pb2.HealthCheckResponse(
        healthy=state is EngineState.SERVING, message=state.value
    )


def build_model_info(engine: Engine) -> vllm_engine_pb2.GetModelInfoResponse:
    """Returns the model by its name: where its files are is the server's affair."""
    model = engine.model
    defaults = {name: model.sampling_defaults.get(name) for name in DEFAULTS}
    chosen = {name: value for name, value in defaults.items() if value is not None}
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=model.max_model_tokens,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        model_type=model.architecture,
        architectures=[model.architecture] if model.architecture else [],
        eos_token_ids=sorted(model.eos_ids),
        bos_token_id=model.bos_id or 0,
        max_req_input_len=model.max_model_tokens - 1,
        default_sampling_params_json=json.dumps(chosen, sort_keys=True) if chosen else "",
    )


def build_server_info(
    engine: Engine, load: Load, *, uptime_s: float
) -> vllm_engine_pb2.GetServerInfoResponse:
    """Returns what a gateway may want to know of one that shares no caches with others."""
    config = engine.config
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=load.running_requests + load.waiting_requests,
        is_paused=engine.state is not EngineState.SERVING,
        uptime_seconds=uptime_s,
        server_type=SERVER_TYPE,
        data_parallel_size=1,
        kv_cache_dtype=config.kv.dtype,
        block_size=config.kv.page_size,
        model_dtype=engine.model.dtype,
        max_num_seqs=config.scheduler.max_seqs,
        constrained_decoding_start="first_token",
    )


def build_loads(load: Load) -> vllm_engine_pb2.GetLoadsResponse:
    """Returns the load of the one rank there is."""
    most = load.max_running_requests
    rank = vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=load.running_requests,
        num_waiting_reqs=load.waiting_requests,
        num_total_reqs=load.running_requests + load.waiting_requests,
        num_used_tokens=load.used_kv_tokens,
        max_total_num_tokens=load.total_kv_tokens,
        token_usage=load.kv_cache_usage,
        gen_throughput=load.generation_tokens_per_second,
        utilization=load.running_requests / most if most else 0.0,
        max_running_requests=most,
        num_waiting_uncached_tokens=load.waiting_prompt_tokens,
    )
    return vllm_engine_pb2.GetLoadsResponse(
        timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
        version=jaxserve.__version__,
        dp_rank_count=1,
        loads=[rank],
    )
