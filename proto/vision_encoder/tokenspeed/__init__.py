"""Messages of TokenSpeed's encode workers and schedulers, as the SMG gateway publishes them.

The three proto files are unchanged copies from the wheel smg-grpc-proto 0.4.28 (``smg_grpc_proto/proto``,
https://github.com/smg-project/smg), Copyright 2024 SMG Team, Apache License 2.0, whose text is this project's
LICENSE. ``proto/generate.sh`` writes the ``_pb2`` files. The proto files keep their names, so that a process
may import this package and that wheel: protobuf takes a file twice if name and content are equal.
"""
