#!/usr/bin/env bash
# Rows of one file over HTTP, from `vision-encoder serve --http-listen 127.0.0.1:8000`:
#   examples/curl.sh PHOTO.jpg [rows.safetensors]
set -euo pipefail
out=${2:-rows.safetensors}
# An answer that is no success is JSON with the reason.
curl -sS --fail-with-body "http://${SERVER:-127.0.0.1:8000}/v1/encode" -F "image=@$1" -o "$out" || {
    cat "$out" >&2
    rm -f "$out"
    exit 1
}
