"""Installs SMG's gateway, TokenSpeed's receiver and the requirements of their tests into the interpreter that
runs this script.

Owns the recipe of `.venv-tokenspeed`, the environment of `make test-tokenspeed`. install_engines.py chooses
the torch build. Standard library and pip only.

Workarounds:

- TokenSpeed 0.1.1 requires packages for GPUs and an older gRPC. It is therefore installed without
  requirements, with what its receiver of rows imports (BESIDE). bench/harness/tokenspeed_receiver.py stands
  in for its kernels.
- Mooncake's build without CUDA takes the place of those for GPUs. It needs the system's libibverbs1.
- The gateway decodes clips with the `ffmpeg` on PATH. The environment gets one of a wheel.
"""

from __future__ import annotations

import ctypes
import sysconfig
from pathlib import Path

from install import ROOT, install
from install_engines import install_torch_release

PINNED = ("smg==1.13.0", "tokenspeed==0.1.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1")
BESIDE = (
    *("aiohttp", "compressed-tensors==0.20.0", "imageio-ffmpeg", "msgpack", "psutil", "pybase64", "pyzmq"),
    *("requests", "setproctitle", "transformers==5.19.0"),
)


def main() -> None:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise SystemExit(f"Mooncake needs {error.args[0]}: apt-get install libibverbs1") from None
    torch = install_torch_release()
    install("--no-deps", *PINNED)
    install(f"torch=={torch}", *BESIDE, "-e", f"{ROOT}[serve,test]")
    import imageio_ffmpeg

    link = Path(sysconfig.get_path("scripts")) / "ffmpeg"
    link.unlink(missing_ok=True)
    link.symlink_to(imageio_ffmpeg.get_ffmpeg_exe())
    print(f"{', '.join(PINNED)}, torch {torch}")


if __name__ == "__main__":
    main()
