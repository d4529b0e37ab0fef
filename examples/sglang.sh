#!/usr/bin/env bash
# SGLang without its tower, beside an encoder on one GPU, and one question about a picture.
#   VISION_ENCODER=encoder/bin/vision-encoder examples/sglang.sh [MODEL [OPTIONS of SGLang]]
# VISION_ENCODER is the command of the environment that has the service. Ctrl-C ends both.
set -euo pipefail
MODEL=${1:-Qwen/Qwen3-VL-8B-Instruct} ENCODER_PORT=${ENCODER_PORT:-50051} PORT=${PORT:-30000}
VISION_ENCODER=${VISION_ENCODER:-vision-encoder}
PICTURE=${PICTURE:-$(dirname "$0")/../tests/data/photos/coffee.jpg}
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT

"$VISION_ENCODER" serve --model "$MODEL" --listen "127.0.0.1:$ENCODER_PORT" --admin-listen 127.0.0.1:0 >&2 &
until "$VISION_ENCODER" health --server "127.0.0.1:$ENCODER_PORT" >/dev/null 2>&1; do
    kill -0 $! || exit 1
    sleep 1
done
SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=lm_adapter.engines.sglang \
SGLANG_EXTERNAL_MODEL_PACKAGE=lm_adapter.engines.sglang \
SGLANG_VISION_ENCODER='{"target": "127.0.0.1:'"$ENCODER_PORT"'"}' \
    sglang serve --model-path "$MODEL" --served-model-name model --host 127.0.0.1 --port "$PORT" "${@:2}" >&2 &
until curl -sf "http://127.0.0.1:$PORT/health" >/dev/null; do
    kill -0 $! || exit 1
    sleep 1
done
curl -sf "http://127.0.0.1:$PORT/v1/chat/completions" -H 'Content-Type: application/json' -d @- <<END
{"model": "model", "max_tokens": 16, "messages": [{"role": "user", "content": [
    {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,$(base64 -w0 "$PICTURE")"}},
    {"type": "text", "text": "What is in this picture?"}]}]}
END
echo
if [ -t 1 ]; then wait; fi
