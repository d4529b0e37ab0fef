#!/bin/sh
# Writes encoder_pb2.py, encoder_pb2_grpc.py, broker_pb2.py, TokenSpeed's messages and their type stubs beside the
# proto files, or under the folder that the first argument names.
# The generator's versions are pinned here, apart from the run-time's: code generated for protobuf 6.31
# runs with protobuf 6.31 and later, every 7.x included.
set -eu
out=$(cd "${1:-"$(dirname "$0")"}" && pwd)
cd "$(dirname "$0")"
pins="grpcio-tools==1.76.0 protobuf==6.33.6 mypy-protobuf==3.7.0 setuptools==80.9.0"
venv="../.venv-proto"
if [ "$(cat "$venv/pins" 2>/dev/null)" != "$pins" ]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    # shellcheck disable=SC2086  # one argument for each pin
    "$venv/bin/pip" install -qq --disable-pip-version-check $pins
    echo "$pins" > "$venv/pins"
fi
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -I . \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    vision_encoder/v1/encoder.proto
# No service in it, so nothing of gRPC's.
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -I . \
    --python_out="$out" --mypy_out="quiet:$out" vision_encoder/v1/broker.proto
# TokenSpeed's files import each other without a folder, and so does the code that protoc makes of them: its imports
# are made relative. The services are registered by hand.
tokenspeed=vision_encoder/tokenspeed
mkdir -p "$out/$tokenspeed"
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -W ignore -m grpc_tools.protoc -I "$tokenspeed" \
    --python_out="$out/$tokenspeed" --mypy_out="quiet:$out/$tokenspeed" \
    common.proto tokenspeed_scheduler.proto tokenspeed_encoder.proto
sed -i.bak -E 's/^import ([a-z_]+_pb2)( as .*)?$/from . import \1\2/' "$out/$tokenspeed"/*_pb2.py "$out/$tokenspeed"/*_pb2.pyi
rm "$out/$tokenspeed"/*.bak
