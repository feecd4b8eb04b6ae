"""Protobuf and gRPC code generated from protos/jaxserve/v1 by scripts/gen_protos; not edited."""
