#!/usr/bin/env bash
# Rows of one file over HTTP, from `vision-encoder serve --http-listen 127.0.0.1:8000`:
#   examples/curl.sh PHOTO.jpg [rows.safetensors]
set -euo pipefail
curl -sSf "http://${SERVER:-127.0.0.1:8000}/v1/encode" -F "image=@$1" -o "${2:-rows.safetensors}"
