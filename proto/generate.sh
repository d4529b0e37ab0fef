#!/bin/sh
# Writes encoder_pb2.py, encoder_pb2_grpc.py and their type stubs beside encoder.proto.
# The generator's versions are pinned here, apart from the run-time's: code generated for protobuf 6.31
# runs with protobuf 6.31 and later, every 7.x included.
set -eu
cd "$(dirname "$0")"
venv="../.venv-proto"
if [ ! -x "$venv/bin/protoc-gen-mypy" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check \
        grpcio-tools==1.76.0 protobuf==6.33.6 mypy-protobuf==3.7.0 setuptools==80.9.0
fi
PATH="$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I . \
    --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. vision_encoder/v1/encoder.proto
