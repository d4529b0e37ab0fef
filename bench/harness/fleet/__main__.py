"""Four encoders on the CPU behind a real Envoy, until Ctrl-C: `make fleet`.

python -m bench.harness.fleet CHECKPOINT
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from bench.harness.fleet.fleet import Fleet

ENCODE = (
    ".venv/bin/vision-encoder encode --fleet --server {} tests/data/photos/coffee.jpg --out rows.safetensors"
)


def main() -> None:
    checkpoint = Path(sys.argv[1]).resolve()
    # A shell without job control starts background jobs with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        try:
            with Fleet(Path(folder), checkpoint, num_gateways=1, num_callers=0) as fleet:
                (gateway,) = fleet.gateways
                print(f"gateway at {gateway.target}: VisionEncoderClient({gateway.target!r}, fleet=True)")
                print("encoders at " + ", ".join(encoder.target for encoder in fleet.replicas))
                print(
                    f"logs in {folder}; figures at http://127.0.0.1:{gateway.operations_port}/stats/prometheus"
                )
                print("try:", ENCODE.format(gateway.target))
                print("Ctrl-C ends it.", flush=True)
                signal.pause()
        except KeyboardInterrupt:
            print("ended")


if __name__ == "__main__":
    main()
