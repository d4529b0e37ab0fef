"""One file to rows: python examples/encode_file.py PHOTO.jpg [--server 127.0.0.1:50051]"""

import argparse
import sys

from lm_adapter import ImageItem, ItemFailed, VisionEncoderClient

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("image")
parser.add_argument("--server", default="127.0.0.1:50051")
options = parser.parse_args()
with VisionEncoderClient(options.server) as client:
    try:
        rows = client.encode(ImageItem.from_path(options.image))
    except ItemFailed as failure:  # a bad file: the service and other items go on
        sys.exit(f"{options.image}: {failure}")
    print(f"grid {tuple(rows.grid_thw)}, {rows.num_rows} rows of {rows.width} in {rows.dtype}")
    print(rows.torch()[:2, :4])  # [rows, D * (1 + deepstack levels)]
