"""Vectors of digests, keys and pad ids, from the rules as they are written down.

Owns their cases and answers: BLAKE3 spelled out, SHA-256 of the standard library, the engines' formulas. It
imports nothing of the project's code.
"""

from __future__ import annotations

import base64
import hashlib
import random
import struct
from typing import Any

from tests.conformance.blake3_spelled_out import blake3_digest
from tests.conformance.vectors import Case, Vectors

# At the borders of blocks, chunks and subtrees.
LENGTHS = (0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 5000, 8193)
FIRST_PAD_ID = 1_000_000


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def prefixed(fields: list[bytes]) -> bytes:
    """Each field behind its length, four bytes, little-endian."""
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)


def content_digests() -> Vectors:
    cases = [
        Case(
            "content_digest",
            f"{length} bytes",
            {"data_base64": text(data := bytes(i % 251 for i in range(length)))},
            {"digest": blake3_digest(data).hex()},
        )
        for length in LENGTHS
    ]
    return Vectors("content_digest", "BLAKE3 as its paper has it: blake3_spelled_out.py", tuple(cases))


def pixels_digests() -> Vectors:
    data = bytes(i * 7 % 256 for i in range(48))
    asked: list[tuple[str, dict[str, Any]]] = [
        ("uint8", {"dtype": "uint8", "shape": [4, 12], "grid": [1, 2, 2]}),
        ("transposed shape", {"dtype": "uint8", "shape": [12, 4], "grid": [1, 2, 2]}),
        ("transposed grid", {"dtype": "uint8", "shape": [4, 12], "grid": [1, 1, 4]}),
        ("float32", {"dtype": "float32", "shape": [4, 3], "grid": [1, 2, 2]}),
        ("bfloat16, three axes", {"dtype": "bfloat16", "shape": [4, 3, 2], "grid": [1, 2, 2]}),
    ]
    cases = []
    for name, what in asked:
        header = prefixed(
            [
                b"vision_encoder.pixels.v1",
                what["dtype"].encode(),
                struct.pack(f"<{len(what['shape'])}Q", *what["shape"]),
                struct.pack("<3Q", *what["grid"]),
            ]
        )
        expected = {"digest": blake3_digest(header + data).hex()}
        cases.append(Case("pixels_digest", name, {**what, "data_base64": text(data)}, expected))
    return Vectors("pixels_digest", "BLAKE3 over a length-prefixed header and the data", tuple(cases))


def embedding_keys() -> Vectors:
    plain: dict[str, Any] = {
        "namespace": "",
        "digest": bytes(range(32)).hex(),
        "modality": "image",
        "model_fingerprint": bytes(range(32, 64)).hex(),
        "preprocess_fingerprint": bytes(range(64, 96)).hex(),
        "options": [],
        "pixels_grid": None,
        "dtype": "bfloat16",
    }
    changed: dict[str, dict[str, Any]] = {
        "plain": {},
        "namespace": {"namespace": "tenant-a"},
        "namespace beyond ASCII": {"namespace": "großkunde/北京"},
        "digest": {"digest": (b"\xff" * 32).hex()},
        "modality": {"modality": "video"},
        "model": {"model_fingerprint": bytes(32).hex()},
        "processor": {"preprocess_fingerprint": bytes(32).hex()},
        "one option": {"options": [["max_pixels", "int", 1_003_520]]},
        "options are sorted": {"options": [["min_pixels", "int", 3136], ["max_pixels", "int", 1_003_520]]},
        "a clip's sampling": {
            "modality": "video",
            "options": [["fps", "float", 1.5], ["max_frames", "int", 64], ["min_frames", "int", 4]],
        },
        "pixels": {"pixels_grid": [1, 16, 24]},
        "pixels, transposed": {"pixels_grid": [1, 24, 16]},
        "dtype": {"dtype": "float32"},
    }
    cases = []
    for name, changes in changed.items():
        asked = {**plain, **changes}
        cases.append(Case("embedding_key", name, asked, {"key": embedding_key(asked)}))
    return Vectors("embedding_key", "SHA-256 over the length-prefixed fields", tuple(cases))


def embedding_key(asked: dict[str, Any]) -> str:
    grid = asked["pixels_grid"]
    source = "encoded" if grid is None else f"pixels:{grid[0]},{grid[1]},{grid[2]}"
    return key_of(asked, bytes.fromhex(asked["digest"]), asked["modality"], source)


def key_of(asked: dict[str, Any], digest: bytes, modality: str, source: str) -> str:
    options = []
    for name, kind, value in sorted(asked["options"]):
        shown = struct.pack("<d", value).hex() if kind == "float" else str(value)
        options.append(f"{name}={shown}")
    fields = [
        b"vision_encoder.key.v1",
        asked["namespace"].encode(),
        digest,
        modality.encode(),
        bytes.fromhex(asked["model_fingerprint"]),
        bytes.fromhex(asked["preprocess_fingerprint"]),
        ";".join(options).encode(),
        source.encode(),
        asked["dtype"].encode(),
    ]
    return hashlib.sha256(prefixed(fields)).hexdigest()


def frames_keys() -> Vectors:
    """Clips that come as arrays of frames: at a rate, at none, with timestamps, and some that are refused."""
    plain: dict[str, Any] = {
        "namespace": "",
        "digest": None,
        "model_fingerprint": bytes(range(32, 64)).hex(),
        "preprocess_fingerprint": bytes(range(64, 96)).hex(),
        "options": [],
        "dtype": "bfloat16",
        "shape": [2, 2, 3, 3],
        "data_base64": text(bytes(i * 11 % 256 for i in range(36))),
        "fps": None,
        "timestamps_s": None,
    }
    longer = {"shape": [3, 8, 16, 3], "data_base64": text(bytes(i % 251 for i in range(1152)))}
    changed: dict[str, dict[str, Any]] = {
        "no rate": {},
        "24 a second": {"fps": 24.0},
        "24 a second, written without a fraction": {"fps": 24},
        "25 a second": {"fps": 25.0},
        "a rate that no decimal ends": {"fps": 24000 / 1001},
        "a frame in eight seconds": {"fps": 0.125},
        "timestamps": {"timestamps_s": [0.0, 0.5]},
        "timestamps without fractions": {"timestamps_s": [3, 7]},
        "timestamps of 24 a second are no rate": {"timestamps_s": [0.0, 1 / 24]},
        "timestamps that no decimal ends": {"timestamps_s": [1001 / 24000, 0.1 + 0.2]},
        "one frame": {"shape": [1, 4, 3, 3]},
        "transposed shape": {"shape": [2, 3, 2, 3]},
        "frames longer than a chunk of the hash": {**longer, "timestamps_s": [0.0, 1.5, 61.25]},
        "the caller's digest": {"digest": (b"\xff" * 32).hex(), "fps": 2.0},
        "the caller's digest, timestamps": {"digest": (b"\xff" * 32).hex(), "timestamps_s": [0.0, 0.5]},
        "a rate to sample at beside the frames' own": {"fps": 30.0, "options": [["fps", "float", 1.5]]},
        "namespace": {"namespace": "tenant-a", "fps": 2.0},
        "dtype": {"dtype": "float32", "fps": 2.0},
        "a rate of 0": {"fps": 0.0},
        "a rate of 0, written without a fraction": {"fps": 0},
        "a rate below 0": {"fps": -24.0},
        "a rate and timestamps": {"fps": 2.0, "timestamps_s": [0.0, 0.5]},
        "a timestamp too few": {"timestamps_s": [0.0]},
        "a timestamp too many": {"timestamps_s": [0.0, 0.5, 1.0]},
    }
    cases = []
    for name, changes in changed.items():
        asked = {**plain, **changes}
        cases.append(Case("frames_key", name, asked, frames_key(asked)))
    source = "BLAKE3 over a length-prefixed header and the frames, SHA-256 over the length-prefixed fields"
    return Vectors("frames_key", source, tuple(cases))


def frames_key(asked: dict[str, Any]) -> dict[str, Any]:
    fps, times, shape = asked["fps"], asked["timestamps_s"], asked["shape"]
    if fps is not None and (fps <= 0 or times is not None):
        return {"refused": True}
    if times is not None and len(times) != shape[0]:
        return {"refused": True}
    if times is None:
        source = "frames:fps=" + struct.pack("<d", 24.0 if fps is None else fps).hex()
    else:
        source = "frames:at=" + hashlib.sha256(b"".join(struct.pack("<d", at) for at in times)).hexdigest()
    if asked["digest"] is None:
        header = prefixed([b"vision_encoder.frames.v1", struct.pack("<4Q", *shape)])
        digest = blake3_digest(header + base64.b64decode(asked["data_base64"]))
    else:
        digest = bytes.fromhex(asked["digest"])
    return {"digest": digest.hex(), "key": key_of(asked, digest, "video", source)}


def tokenspeed_id(digest: bytes, modality: str) -> int:
    band = (2**31 - 1 - 1_000_000 + 1) // 3
    tag = {"image": 0, "video": 1}[modality]
    return 1_000_000 + tag * band + int.from_bytes(digest[:8], "little") % band


def sglang_id(digest: bytes) -> int:
    return 1_000_000 + int.from_bytes(digest[:8], "little") % 2**30


def pad_ids() -> Vectors:
    rng = random.Random(6)
    digests = {f"random {n}": rng.randbytes(32) for n in range(6)}
    digests["zeros"] = bytes(32)
    digests["ones"] = b"\xff" * 32
    # Two contents that meet in every scheme: equal first eight bytes.
    digests["collides with random 0"] = digests["random 0"][:8] + bytes(24)
    cases = []
    for name, digest in digests.items():
        for modality in ("image", "video"):
            for scheme in ("tokenspeed", "sglang"):
                found = tokenspeed_id(digest, modality) if scheme == "tokenspeed" else sglang_id(digest)
                asked = {"scheme": scheme, "modality": modality, "digest": digest.hex()}
                cases.append(Case("pad_id", f"{name}, {modality}, {scheme}", asked, {"pad_id": found}))
    return Vectors("pad_id", "the engines' formulas", tuple(cases))


def restored_ids() -> Vectors:
    """Prompts put together with and without pad ids at the same time."""
    rng = random.Random(60)
    cases = []
    vocabularies = {
        "qwen": (151_655, 151_656, 151_936),
        "kimi, whose video id is outside": (163_605, 163_840, 163_840),
    }
    for name, (image_id, video_id, vocab_size) in vocabularies.items():
        for scheme in ("tokenspeed", "sglang"):
            padded: list[int] = []
            restored: list[int] = []
            for _ in range(6):
                words = [rng.randrange(1000) for _ in range(rng.randrange(4))]
                modality = rng.choice(["image", "video"])
                digest, rows = rng.randbytes(32), rng.randrange(1, 4)
                is_video = modality == "video" and scheme == "tokenspeed" and video_id < vocab_size
                pad = tokenspeed_id(digest, modality) if scheme == "tokenspeed" else sglang_id(digest)
                padded += words + [pad] * rows
                restored += words + [video_id if is_video else image_id] * rows
            asked = {
                "scheme": scheme,
                "image_placeholder_id": image_id,
                "video_placeholder_id": video_id,
                "vocab_size": vocab_size,
                "ids": padded,
            }
            cases.append(Case("restored_ids", f"{name}, {scheme}", asked, {"ids": restored}))
    return Vectors("restored_ids", "prompts put together with and without pad ids", tuple(cases))


def all_vectors() -> list[Vectors]:
    return [
        content_digests(),
        pixels_digests(),
        embedding_keys(),
        frames_keys(),
        pad_ids(),
        restored_ids(),
    ]
