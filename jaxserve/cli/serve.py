"""`jaxserve serve`: the server of one model, over gRPC and HTTP, until a signal."""

import argparse
import os
from pathlib import Path

from jaxserve.cli import exit_codes
from jaxserve.cli.options import (
    add_metrics_options,
    add_model_options,
    read_config,
    resolve_options,
)
from jaxserve.cli.recording import recording
from jaxserve.cli.trace import tracing
from jaxserve.config import Config
from jaxserve.engine import Engine
from jaxserve.engine.interpreter import settle_heap, tune_interpreter
from jaxserve.metrics import Metrics

EPILOG = """\
examples:
  jaxserve serve
  jaxserve serve path/to/model --dtype bfloat16 --port 50051
  jaxserve serve --host 0.0.0.0 --set auth.keys_file=keys.jsonl \\
      --set tls.cert_file=cert.pem --set tls.key_file=key.pem
  jaxserve serve --http-port 8000 & curl -s localhost:8000/v1/models
  jaxserve serve --config configs/baseline.toml
  jaxserve serve --metrics-port 9100 & curl -s localhost:9100/metrics

The ports are open at once; health says NOT_SERVING until the model is loaded
and every program is compiled. The first SIGTERM or ctrl-C refuses new requests
and lets running ones end (server.drain_timeout_s), the second ends them. An
address that others reach needs keys (`jaxserve keys`) or client certificates;
SIGHUP reads keys, tenants' limits and certificates again (docs/security.md).
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the parser of all."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over gRPC and HTTP",
        description="Serve a model over gRPC (protos/jaxserve/v1), with health and reflection,\n"
        "and, where a port is given, over HTTP as OpenAI's API (docs/http.md).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser, log_level="info")
    parser.add_argument("--host", metavar="H", help="address to bind; over server.host")
    parser.add_argument(
        "--port", type=int, metavar="N", help="0 picks a free one; over server.port"
    )
    parser.add_argument(
        "--http-host", metavar="H", help="address to bind for HTTP; over server.http_host"
    )
    parser.add_argument(
        "--http-port",
        type=int,
        metavar="N",
        help="serve HTTP here; 0 picks a free port; over server.http_port (default: no HTTP)",
    )
    parser.add_argument(
        "--vllm-engine",
        action="store_const",
        const=True,
        help="serve vllm.grpc.engine.VllmEngine beside our own services, for the gateway smg "
        "(docs/smg.md; needs the extra smg); over server.vllm_engine",
    )
    add_metrics_options(parser)
    parser.add_argument(
        "--trace-file",
        type=Path,
        metavar="FILE",
        help="written at the end: the last measure.trace_steps steps and requests, for "
        "`jaxserve trace --trace-file`",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serves until a signal or a failure; returns the exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines beside ours, as for a port
    from jaxserve.engine.start import load_engine
    from jaxserve.server.lifecycle import serve  # here: grpc, for this command only
    from jaxserve.server.metrics_http import serving_metrics

    asked = config = read_config(options).config
    tune_interpreter(config.scheduler.max_seqs)
    metrics = Metrics()
    with (
        serving_metrics(metrics, config.metrics),
        recording(config) as record,
        tracing(config, options.trace_file) as (config, trace),
    ):

        def load() -> Engine:
            engine = load_engine(options.model, config, metrics=metrics)
            record(engine)
            trace(engine)
            settle_heap()
            return engine

        def read_again() -> Config:
            again = resolve_options(options).config
            # what --trace-file adds is not what somebody changed
            is_same = again.measure == asked.measure
            return again.model_copy(update={"measure": config.measure}) if is_same else again

        code = serve(load, config, metrics, read_config=read_again)
    has_failed = code != 0
    return exit_codes.INTERNAL if has_failed else exit_codes.OK
