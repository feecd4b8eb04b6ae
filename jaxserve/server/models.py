"""ModelService: what is served."""

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
            model = convert.build_model(self._get_engine().model)
        return model_pb2.ListModelsResponse(models=[model])

    @override
    async def GetModel(
        self, message: model_pb2.GetModelRequest, context: Context
    ) -> model_pb2.GetModelResponse:
        async with self._edge.call(context, "GetModel"):
            refuse_unsupported(message)
            served = self._get_engine().model
            convert.check_model(message.name, served, field="name")
        return model_pb2.GetModelResponse(model=convert.build_model(served))
