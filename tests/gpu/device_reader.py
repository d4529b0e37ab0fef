"""One rank of a tensor-parallel reader: reads rows by the record that another process sent, on its own GPU.

Run as ``device_reader.py <target> <reader>``, with the pickled record on standard input; writes one line of
JSON.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import sys

import torch

from lm_adapter import VisionEncoderClient


def main() -> None:
    target, reader = sys.argv[1], int(sys.argv[2])
    record = pickle.loads(sys.stdin.buffer.read())
    out = torch.zeros(record.rows_bytes, dtype=torch.uint8, device="cuda:0")
    with VisionEncoderClient(target, device="cuda:0", timeout_s=60) as client:
        choice = client.wait_transport()
        rows = client.read_shared(record, reader=reader, out=out)
        digest = hashlib.sha256(bytes(out.cpu().numpy())).hexdigest()
        same = rows.payload.data_ptr() == out.data_ptr()
    print(json.dumps({"transport": choice.name, "reason": choice.reason, "digest": digest, "in_place": same}))


if __name__ == "__main__":
    main()
