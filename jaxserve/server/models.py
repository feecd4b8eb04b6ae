"""ModelService: what is served."""

import json
from collections.abc import Callable
from typing import override

from jaxserve.engine import Engine
from jaxserve.gen import model_pb2, model_pb2_grpc
from jaxserve.server import convert
from jaxserve.server.edge import Context, Edge
from jaxserve.server.fields import refuse_unsupported


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers from the engine's own record of its model."""

    def __init__(self, get_engine: Callable[[], Engine], edge: Edge) -> None:
        self._get_engine = get_engine
        self._edge = edge

    @override
    async def ListModels(
        self, message: model_pb2.ListModelsRequest, context: Context
    ) -> model_pb2.ListModelsResponse:
        async with self._edge.call(context, "ListModels"):
            refuse_unsupported(message)
            model = build_model(self._get_engine())
        return model_pb2.ListModelsResponse(models=[model])

    @override
    async def GetModel(
        self, message: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        async with self._edge.call(context, "GetModel"):
            refuse_unsupported(message)
            engine = self._get_engine()
            convert.check_model(message.name, engine.model, field="name")
        return model_pb2.GetModelResponse(model=build_model(engine))


def build_model(engine: Engine) -> model_pb2.Model:
    """Returns what an engine serves."""
    model = engine.model
    return model_pb2.Model(
        name=model.name,
        architectures=[model.architecture] if model.architecture else [],
        max_model_tokens=model.max_model_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_ids),
        bos_token_id=model.bos_id,
        weight_dtype=model.dtype,
        quantization=model.quantization,
        default_sampling_json=json.dumps(dict(model.sampling_defaults), sort_keys=True),
        has_chat_template=model.has_chat_template,
        tool_parser=engine.parsers.tool,
        reasoning_parser=engine.parsers.reasoning,
    )
