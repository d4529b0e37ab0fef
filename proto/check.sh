#!/bin/sh
# Generates the code again into a temporary folder and compares it with the committed files.
set -eu
cd "$(dirname "$0")"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
./generate.sh "$fresh"
status=0
for name in encoder_pb2.py encoder_pb2.pyi encoder_pb2_grpc.py encoder_pb2_grpc.pyi \
    broker_pb2.py broker_pb2.pyi; do
    diff -u "vision_encoder/v1/$name" "$fresh/vision_encoder/v1/$name" || status=1
done
if [ "$status" -ne 0 ]; then
    echo "the generated code is not what the proto files give: run 'make proto' and commit it" >&2
fi
exit "$status"
