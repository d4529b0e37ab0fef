"""p45: a later start uses the kernel choices of a former one without measuring; a wrong file is ignored."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from encoder_service.checkpoints.synthetic import make_checkpoint
from encoder_service.engine import choices
from encoder_service.engine.choices import COMPILED, ChoicesFile, copy_kept, keep_compiled, kept_folder
from encoder_service.engine.fast_path import KernelSelections, choose_kernels
from encoder_service.scheduler.buckets import Bucket, BucketLadder
from encoder_service.towers import load_tower
from encoder_service.towers.attention import SdpaAttention, SequenceBounds
from encoder_service.towers.attention.cases import PackedBatch, attention_selection
from encoder_service.towers.gemm import STEPS
from encoder_service.towers.layers import BlockShape, PlainTower

BATCHES = [PackedBatch((20, 5), 32, 4, 32), PackedBatch((40,), 64, 4, 64)]
BLOCK = BlockShape(16, 32, 2, 8, 1e4, "blocked")
CPU = torch.device("cpu")


class Attention(SdpaAttention):
    """Right, or wrong from the moment that ``factor`` is not 1."""

    static_lengths = False

    def __init__(self, name: str) -> None:
        super().__init__(one_by_one=True)
        self.name = name  # type: ignore[misc]
        self.factor = 1.0

    def attend(
        self, q_PHd: torch.Tensor, k_PHd: torch.Tensor, v_PHd: torch.Tensor, bounds: SequenceBounds
    ) -> torch.Tensor:
        return super().attend(q_PHd, k_PHd, v_PHd, bounds) * self.factor


class Start:
    """One start after another on the same stand-in for a device. seed: kept choices of an image."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.choices_dir = folder
        self.seed: Path | None = None
        self.environment: dict[str, Any] = {"device": "a GPU", "driver": "1.2", "versions": {"torch": "2.13"}}
        self.backends = [Attention("slow"), Attention("fast")]
        self.num_timed = 0
        monkeypatch.setattr(choices, "environment_of", lambda device: self.environment)
        monkeypatch.setattr(choices, "driver_version", lambda: self.environment["driver"])

    def _time_ms(self, run: Callable[[], object]) -> float:
        """In each case the first backend is timed before the second one."""
        self.num_timed += 1
        return 2.0 if self.num_timed % 2 else 1.0

    def __call__(self, *, deterministic: bool = False) -> tuple[set[str], int]:
        """The backends that were chosen, and how many runs were timed for it."""
        self.num_timed = 0
        attention = attention_selection(
            self.backends, BATCHES, BLOCK, torch.float32, CPU, deterministic=deterministic
        )
        if self.seed is not None:
            copy_kept(self.seed, self.folder)
        file = ChoicesFile.of_device(self.folder, CPU, {"deterministic": deterministic})
        kernels = choose_kernels(KernelSelections(attention, {}, {}), file, self._time_ms)
        return set(kernels.names["attention"].values()), self.num_timed

    @property
    def folder(self) -> Path:
        return kept_folder(self.choices_dir, CPU)

    @property
    def file(self) -> Path:
        (path,) = self.folder.iterdir()
        return path


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return Start(tmp_path / "made" / "later", monkeypatch)


def test_p45_a_later_start_measures_nothing(start: Start) -> None:
    assert start() == ({"fast"}, 4)
    assert start() == ({"fast"}, 0)


def test_attention_within_windows_is_measured_too(tmp_path: Path) -> None:
    """A kernel that is fast on whole images may waste most of its tiles on windows."""
    cases = {}
    for family in ("qwen3_vl", "qwen2_5_vl"):
        make_checkpoint(tmp_path / family, family, "tiny", 3)
        tower = load_tower(tmp_path / family, device=CPU, dtype=torch.float32).tower
        assert isinstance(tower, PlainTower)
        ladder = BucketLadder((Bucket(1024, 4, 256, 1), Bucket(1024, 4, 1024, 1)))
        selections = KernelSelections.of(tower, [Attention("only")], ladder, deterministic=True)
        cases[family] = {case.shape for case in selections.attention.cases}
    assert cases["qwen3_vl"] == {(1024, 256), (1024, 1024)}
    assert cases["qwen2_5_vl"] == cases["qwen3_vl"] | {(1024, 64)}


@pytest.mark.parametrize("name", ["device", "driver", "versions"])
def test_p45_another_device_driver_or_version_measures_anew(start: Start, name: str) -> None:
    start()
    start.environment = {**start.environment, name: "another"}
    assert start() == ({"fast"}, 4)
    assert start() == ({"fast"}, 0)


def test_the_file_has_the_layout_of_former_versions(start: Start) -> None:
    start()
    assert json.loads(start.file.read_text()) == {
        "format": 1,
        "measured_for": {**start.environment, "deterministic": False},
        "attention": {"32x32": "fast", "64x64": "fast"},
        "gemms": {step: {"1": "torch"} for step in STEPS},
    }


def test_a_first_start_takes_what_came_with_its_image(start: Start, tmp_path: Path) -> None:
    start()
    start.seed, start.choices_dir = start.choices_dir, tmp_path / "of a new pod"
    for path in start.seed.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    with capture_logs() as logs:
        assert start() == ({"fast"}, 0)
    assert {"event": "kept choices copied", "files": 1}.items() <= logs[0].items()
    assert start() == ({"fast"}, 0)


@pytest.mark.parametrize("name", ["device", "driver", "versions"])
def test_what_came_for_another_device_driver_or_version_is_left(
    start: Start, tmp_path: Path, name: str
) -> None:
    start()
    kept = start.folder
    (kept / "triton" / "key").mkdir(parents=True)
    (kept / "triton" / "key" / "kernel.cubin").write_text("for that device")
    start.seed, start.choices_dir = start.choices_dir, tmp_path / "of a new pod"
    start.environment = {**start.environment, name: "another"}
    with capture_logs() as logs:
        assert start() == ({"fast"}, 4)
    assert logs[0]["event"] == "no kept choices for this GPU, driver and versions"
    assert logs[0]["found"] == [kept.name]
    assert [path.name for path in start.folder.rglob("*")] == [start.file.name]


def test_what_a_start_measured_itself_stays(start: Start, tmp_path: Path) -> None:
    start()
    start.seed, start.choices_dir = start.choices_dir, tmp_path / "own"
    start.folder.mkdir(parents=True)
    seeded = start.seed / start.folder.name
    (file,) = seeded.iterdir()
    own = start.folder / file.name
    own.write_text(with_field("attention", {"32x32": "slow", "64x64": "slow"})(file.read_text()))
    assert start() == ({"slow"}, 0)


def test_a_seed_that_cannot_be_copied_costs_a_line_only(start: Start, tmp_path: Path) -> None:
    start()
    start.seed, start.choices_dir = start.choices_dir, tmp_path / "file"
    start.choices_dir.write_text("")
    with capture_logs() as logs:
        assert start() == ({"fast"}, 4)
    assert "kept choices not copied" in [entry["event"] for entry in logs]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"child_paths": {"a": 1}}'])
def test_a_damaged_file_of_a_seed_costs_a_line_only(start: Start, tmp_path: Path, content: str) -> None:
    start()
    (start.folder / "triton" / "key").mkdir(parents=True)
    (start.folder / "triton" / "key" / "__grp__norm.json").write_text(content)
    start.seed, start.choices_dir = start.choices_dir, tmp_path / "of a new pod"
    with capture_logs() as logs:
        assert start() == ({"fast"}, 0)
    assert "kept choices not copied" in [entry["event"] for entry in logs]


def test_kernels_that_triton_compiled_are_found_where_they_were_copied_to(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has files with full paths, which the image's folder no longer has."""
    cache = pytest.importorskip("triton.runtime.cache")

    def manager(folder: Path) -> Any:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
        return cache.FileCacheManager("KEY")

    first, seed = start.folder, start.choices_dir
    files = {name: manager(first).put(b"binary", name) for name in ("norm.cubin", "norm.json")}
    manager(first).put_group("norm.json", files)
    start.choices_dir = tmp_path / "of a new pod"
    copy_kept(seed, start.folder)
    first.rename(seed / "away")
    found = manager(start.folder).get_group("norm.json")
    assert found is not None
    assert {name: Path(path).read_bytes() for name, path in found.items()} == dict.fromkeys(files, b"binary")


def with_field(name: str, value: Any) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), name: value})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 100_000,
        lambda text: "[1, 2]",
        with_field("format", 2),
        with_field("measured_for", {"device": "a foreign GPU"}),
        with_field("attention", {"32x32": "fast"}),
        with_field("attention", {"32x32": "fast", "64x64": "of another release"}),
        with_field("attention", ["fast", "fast"]),
        with_field("gemms", {"rotate": 3}),
    ],
)
def test_p45_a_file_that_cannot_be_right_is_ignored_with_a_line(
    start: Start, damage: Callable[[str], str]
) -> None:
    start()
    start.file.write_text(damage(start.file.read_text()))
    with capture_logs() as logs:
        assert start() == ({"fast"}, 4)
    assert [entry["event"] for entry in logs].count("kernel choices ignored") == 1
    assert start() == ({"fast"}, 0)


def test_a_saved_backend_that_is_wrong_by_now_is_not_used(start: Start) -> None:
    start()
    start.backends[1].factor = 1.5
    with capture_logs() as logs:
        assert start()[0] == {"slow"}
    assert any("relative error" in entry.get("reason", "") for entry in logs)


def test_without_a_known_driver_nothing_is_kept(start: Start) -> None:
    start.environment["driver"] = None
    assert start() == ({"fast"}, 4)
    assert not start.folder.exists()


def test_deterministic_choices_are_one_backend(start: Start) -> None:
    """Two backends round differently."""
    assert start(deterministic=True) == ({"fast"}, 4)
    mixed = {"32x32": "slow", "64x64": "fast"}
    start.file.write_text(with_field("attention", mixed)(start.file.read_text()))
    assert start(deterministic=True) == ({"fast"}, 4)


def test_a_folder_that_is_a_file_costs_a_line_only(start: Start, tmp_path: Path) -> None:
    start.choices_dir = tmp_path / "file"
    start.choices_dir.write_text("")
    with capture_logs() as logs:
        assert start() == ({"fast"}, 4)
    assert "kernel choices not kept" in [entry["event"] for entry in logs]


@pytest.fixture
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment as it was, afterwards too."""
    for name in (*COMPILED, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_folders")
def test_p45_compiled_kernels_are_kept_unless_the_environment_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    keep_compiled(tmp_path)
    assert os.environ["QUACK_CACHE_DIR"] == str(tmp_path / "quack")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash-attn-4")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"


@pytest.mark.usefixtures("no_folders")
def test_a_folder_that_cannot_be_written_leaves_the_libraries_to_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    with capture_logs() as logs:
        keep_compiled(folder)
    assert "compiled kernels not kept" in [entry["event"] for entry in logs]
    assert not {*COMPILED, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"} & {*os.environ}
