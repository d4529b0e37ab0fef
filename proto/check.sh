#!/bin/sh
# Generates the code again into a temporary folder and compares it with the committed files.
set -eu
cd "$(dirname "$0")"
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
./generate.sh "$fresh"
status=0
for name in v1/encoder_pb2 v1/encoder_pb2_grpc v1/broker_pb2 \
    tokenspeed/common_pb2 tokenspeed/tokenspeed_scheduler_pb2 tokenspeed/tokenspeed_encoder_pb2; do
    for suffix in py pyi; do
        diff -u "vision_encoder/$name.$suffix" "$fresh/vision_encoder/$name.$suffix" || status=1
    done
done
if [ "$status" -ne 0 ]; then
    echo "the generated code is not what the proto files give: run 'make proto' and commit it" >&2
fi
exit "$status"
