"""The gRPC front end: protobuf in and out, one engine behind it."""
