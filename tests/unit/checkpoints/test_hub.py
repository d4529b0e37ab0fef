"""Models of a hub: what is fetched, resumption, checks, and errors that say what to do."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from encoder_service.checkpoints.hub import MAX_FAILURES, Hub, fetch
from encoder_service.checkpoints.hub_id import HubId, hub_id
from encoder_service.checkpoints.synthetic import FAMILIES, WITH_LANGUAGE_MODEL, config_for, make_checkpoint
from encoder_service.cli import app
from encoder_service.errors import CheckpointError, MismatchedTensors, MissingTensors, UnsupportedCheckpoint
from encoder_service.ingest.decode import DecodeLimits
from encoder_service.ingest.registry import load_preprocessor
from encoder_service.towers import load_tower
from tests.hub_server import FakeHub, serving
from tests.parity.tower_cases import vision_weights, write_published

MODEL = HubId("acme/Seeing-8B")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with a language model. Its second shard has vision tensors alone."""
    folder = tmp_path_factory.mktemp("published") / "qwen"
    make_checkpoint(folder, "qwen3_vl", "tiny", 3, with_lm=True)
    return folder


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path) -> Hub:
    return hub_of(fake, tmp_path)


def hub_of(fake: FakeHub, folder: Path, token: str | bool = False) -> Hub:
    return Hub(HfApi(fake.url, token=token), folder / "hub", folder / "assets", pause=lambda _: None)


def fingerprint(folder: Path) -> bytes:
    return load_tower(folder, device=torch.device("cpu"), dtype=torch.float32).fingerprint


def edited(folder: Path, target: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def test_a_folder_with_only_what_the_tower_needs(
    fake: FakeHub, hub: Hub, family: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "c", family, "tiny", 3, with_lm=family in WITH_LANGUAGE_MODEL)
    model = fake.add(MODEL.repo, tmp_path / "c")
    folder = fetch(MODEL, hub)
    assert fingerprint(folder) == fingerprint(tmp_path / "c")
    load_preprocessor(folder, family, DecodeLimits(1 << 20, 1 << 20))
    settings = {
        f"{name}_config.json" for name in ("preprocessor", "video_preprocessor", "processor")
    } & model.files.keys()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", *settings}
    vision = load_file(folder / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in vision.values())
    # A length and a header for each shard, then one range of neighbours for each.
    names = sorted({name for name, _ in fake.fetched()})
    sizes = [size for _, size in fake.fetched()]
    assert sizes[0::2][: len(names)] == [8] * len(names)
    assert sum(sizes[2 * len(names) :]) == num_bytes
    assert len(sizes) == 3 * len(names)


def test_what_is_there_is_not_fetched_again_and_serves_without_the_hub(
    fake: FakeHub, hub: Hub, published: Path
) -> None:
    fake.add(MODEL.repo, published)
    folder = fetch(MODEL, hub)
    num_requests = len(fake.requests)
    assert fetch(MODEL, hub) == folder
    assert {request.method for request in fake.requests[num_requests:]} == {"HEAD"}
    num_requests = len(fake.requests)
    assert fetch(HubId(MODEL.repo, folder.parent.name), hub) == folder
    assert len(fake.requests) == num_requests
    fake.hub.shutdown()
    fake.hub.server_close()
    assert fetch(MODEL, hub) == folder


def test_a_new_commit_has_a_folder_of_its_own(
    fake: FakeHub, hub: Hub, published: Path, tmp_path: Path
) -> None:
    fake.add(MODEL.repo, published)
    first = fetch(MODEL, hub)
    make_checkpoint(tmp_path / "new", "qwen3_vl", "tiny", 4)
    model = fake.add(MODEL.repo, tmp_path / "new")
    second = fetch(MODEL, hub)
    assert second.parent.name == model.commit
    assert fingerprint(first) == fingerprint(published) != fingerprint(second)


@pytest.mark.parametrize("is_offline", [False, True])
def test_whole_shards_of_the_cache_are_used(
    fake: FakeHub, hub: Hub, published: Path, is_offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on the same node has downloaded them."""
    model = fake.add(MODEL.repo, published)
    for name in model.files:
        hub.file(MODEL, name)
    fake.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: is_offline)
    folder = fetch(MODEL, hub)
    assert fetch(HubId(MODEL.repo, model.commit), hub) == folder
    assert fake.fetched() == []
    assert folder.parent.name == "snapshots"
    assert fingerprint(folder) == fingerprint(published)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_files_of_several_dtypes_stay_readable(
    fake: FakeHub, hub: Hub, tmp_path: Path, num_shards: int
) -> None:
    """The wider type comes second in the shards' order, after an odd number of narrow values."""
    config = config_for("qwen3_vl", "tiny")
    tensors = vision_weights(config, 5, torch.bfloat16)
    for index, name in enumerate(tensors):
        if index % 3:
            tensors[name] = tensors[name].to(torch.float32)
    published = write_published(tmp_path / "c", config, tensors, num_shards)
    first = next(published.glob("model*.safetensors"))
    save_file(load_file(first) | {"odd": torch.zeros(3, dtype=torch.bfloat16)}, first)
    fake.add(MODEL.repo, published)
    assert fingerprint(fetch(MODEL, hub)) == fingerprint(published)


def test_a_broken_transfer_is_continued_where_it_ended(fake: FakeHub, hub: Hub, published: Path) -> None:
    fake.add(MODEL.repo, published)
    pauses: list[float] = []
    hub = Hub(hub.api, hub.cache_dir, hub.assets_dir, pauses.append)
    fake.faults = [("", 0)] * 4 + [("cut", 1000), ("status", 503), ("cut", 0), ("cut", 500)]
    folder = fetch(MODEL, hub)
    sizes = [size for _, size in fake.fetched()][4:]
    assert sizes[1:5] == [sizes[0] - 1000] * 3 + [sizes[0] - 1500]
    assert pauses == [1.0, 2.0, 4.0, 1.0]  # short again once bytes came
    assert fingerprint(folder) == fingerprint(published)


def test_a_fetch_that_failed_is_continued_by_the_next(fake: FakeHub, hub: Hub, published: Path) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("", 0)] * 4 + [("cut", 1000)] + [("status", 500)] * (MAX_FAILURES - 1)
    with pytest.raises(CheckpointError, match="status 500"):
        fetch(MODEL, hub)
    assert hub.assets_dir is not None
    with pytest.raises(CheckpointError):  # what is there is not taken as whole
        load_tower(next(hub.assets_dir.rglob("*.partial")), device=torch.device("cpu"), dtype=torch.float32)
    before = fake.fetched()
    folder = fetch(MODEL, hub)
    assert fake.fetched()[len(before) + 4][1] == before[4][1] - 1000
    assert fingerprint(folder) == fingerprint(published)
    assert not list(hub.assets_dir.rglob("*.partial"))


@pytest.mark.parametrize(("status", "tries"), [(403, 1), (404, 1), (429, MAX_FAILURES), (500, MAX_FAILURES)])
def test_only_transient_answers_are_tried_again(
    fake: FakeHub, hub: Hub, published: Path, status: int, tries: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("status", status)] * MAX_FAILURES
    with pytest.raises(CheckpointError, match=f"status {status}") as raised:
        fetch(MODEL, hub)
    assert "s3cret" not in raised.value.message + "".join(capsys.readouterr())
    assert len(fake.fetched()) == tries


def test_a_partial_file_of_another_layout_is_begun_again(fake: FakeHub, hub: Hub, published: Path) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("", 0)] * 4 + [("cut", 1000)] + [("status", 403)]
    with pytest.raises(CheckpointError):
        fetch(MODEL, hub)
    assert hub.assets_dir is not None
    (partial,) = hub.assets_dir.rglob("model.safetensors")
    partial.write_bytes(b"x" * partial.stat().st_size)
    assert fingerprint(fetch(MODEL, hub)) == fingerprint(published)


def test_a_shard_of_vision_tensors_alone_has_the_hubs_digest(
    fake: FakeHub, hub: Hub, published: Path
) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("", 0)] * 5 + [("flip", 77)]
    with pytest.raises(CheckpointError, match=r"00002-of-00002.* SHA-256 [0-9a-f]{64}, the hub says"):
        fetch(MODEL, hub)
    assert fingerprint(fetch(MODEL, hub)) == fingerprint(published)


def test_a_small_file_has_the_hubs_digest(fake: FakeHub, hub: Hub, published: Path) -> None:
    model = fake.add(MODEL.repo, published)
    path = hub.file(MODEL, INDEX)
    content = path.read_bytes()
    path.resolve().write_bytes(content[:-1] + b" ")
    with pytest.raises(CheckpointError, match=r"index\.json was received with digest"):
        fetch(MODEL, hub)
    fetch(MODEL, hub)
    assert hub.file(MODEL, INDEX).read_bytes() == model.files[INDEX]


def test_a_server_without_ranges_is_refused(fake: FakeHub, hub: Hub, published: Path) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("whole", 0)]
    with pytest.raises(
        CheckpointError, match=r"asked for bytes 0-7/.* is 200 .* download the whole checkpoint"
    ):
        fetch(MODEL, hub)


def test_a_wrong_size_is_refused(fake: FakeHub, hub: Hub, published: Path) -> None:
    model = fake.add(MODEL.repo, published)
    name, content = max((item for item in model.files.items()), key=lambda item: len(item[1]))
    model.announced[name] = len(content) + 1
    with pytest.raises(CheckpointError, match=rf"bytes 0-7/{len(content) + 1}.*/{len(content)}"):
        fetch(MODEL, hub)
    model.announced.clear()
    model.files[name] = content[:-1]
    with pytest.raises(
        CheckpointError, match=rf"end at byte {len(content)}, it has {len(content) - 1} bytes"
    ):
        fetch(MODEL, hub)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "has 0 bytes"),
        (b"\xff" * 20, "header ends at byte"),
        (b"\x02" + b"\0" * 7 + b"[]", "header is invalid"),
        (b"\x05" + b"\0" * 7 + b'{"a":', "header is invalid"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    fake: FakeHub, hub: Hub, published: Path, content: bytes, reason: str
) -> None:
    fake.add(MODEL.repo, published).files["model.safetensors"] = content
    with pytest.raises(CheckpointError, match=f"not a whole safetensors file: .*{reason}"):
        fetch(MODEL, hub)


def test_a_model_that_does_not_fit_costs_no_transfer(
    fake: FakeHub, hub: Hub, published: Path, tmp_path: Path
) -> None:
    """The errors are those of a local folder."""

    def drop(name: str) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            index = json.loads((folder / INDEX).read_text())
            file = folder / index["weight_map"][name]
            save_file({key: value for key, value in load_file(file).items() if key != name}, file)

        return change

    def unlist(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        del index["weight_map"]["model.visual.patch_embed.proj.bias"]
        (folder / INDEX).write_text(json.dumps(index))

    def configure(**values: Any) -> Callable[[Path], None]:
        def change(folder: Path) -> None:
            config = json.loads((folder / "config.json").read_text())
            config["vision_config"] |= values
            (folder / "config.json").write_text(json.dumps(config))

        return change

    cases: list[tuple[Callable[[Path], None], type[CheckpointError], str]] = [
        (drop("model.visual.patch_embed.proj.bias"), MissingTensors, "index names 1 vision tensors"),
        (unlist, MissingTensors, "lacks 1 of"),
        (configure(intermediate_size=164), MismatchedTensors, "has shape"),
        (configure(hidden_act="silu"), UnsupportedCheckpoint, "hidden_act"),
        (lambda folder: (folder / INDEX).unlink(), CheckpointError, "neither model.safetensors nor"),
        (lambda folder: (folder / "config.json").unlink(), CheckpointError, "has no config.json"),
        (
            lambda folder: (folder / "model-00002-of-00002.safetensors").unlink(),
            CheckpointError,
            "lacks model-00002-of-00002.safetensors, which",
        ),
    ]
    for number, (change, kind, message) in enumerate(cases):
        repo = f"acme/case-{number}"
        fake.add(repo, edited(published, tmp_path / str(number), change))
        with pytest.raises(kind, match=message):
            fetch(HubId(repo), hub)
    assert all(size < 20_000 for _, size in fake.fetched())  # headers


def test_closed_and_missing_models_say_what_to_do(fake: FakeHub, published: Path, tmp_path: Path) -> None:
    fake.add("acme/gated", published, token="sesame", gated=True)
    fake.add("acme/private", published, token="sesame")
    fake.add("acme/open", published)
    stranger, owner = hub_of(fake, tmp_path), hub_of(fake, tmp_path / "owner", "sesame")
    for model, message in (
        (HubId("acme/gated"), rf"accept its terms at {fake.url}/acme/gated, and set HF_TOKEN"),
        (HubId("acme/private"), "check the name, and for a private model set HF_TOKEN"),
        (HubId("acme/nothing"), "no folder acme/nothing here and no model acme/nothing at"),
        (HubId("acme/open", "v2"), "no revision 'v2'"),
        (HubId("acme/a--b"), "cannot have the name"),
    ):
        with pytest.raises(CheckpointError, match=message) as raised:
            fetch(model, stranger)
        assert "\n" not in raised.value.message
        assert "sesame" not in raised.value.message
    fetch(HubId("acme/gated"), owner)
    tokens = {(request.server, request.token) for request in fake.requests if request.token}
    assert tokens == {("hub", "Bearer sesame")}  # never the other host's


def test_an_unreachable_hub_is_named_at_once(
    fake: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.hub.shutdown()
    fake.hub.server_close()
    pauses: list[float] = []
    hub = Hub(hub.api, hub.cache_dir, hub.assets_dir, pauses.append)
    with pytest.raises(
        CheckpointError, match=rf"lacks {MODEL}, and {fake.url} cannot be reached: .* refused"
    ):
        fetch(MODEL, hub)
    assert pauses == []
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set: run `vision-encoder download"):
        fetch(MODEL, hub)


def test_a_full_disk_is_refused_before_the_transfer(
    fake: FakeHub, hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.add(MODEL.repo, published)
    full = shutil._ntuple_diskusage(10**9, 10**9, 400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(CheckpointError, match=r"need \d+ more bytes, and 400000 are free at"):
        fetch(MODEL, hub)


def test_two_processes_fetch_once(fake: FakeHub, hub: Hub, published: Path) -> None:
    fake.add(MODEL.repo, published)
    fake.faults = [("hang", 0)]
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(fetch(MODEL, hub))) for _ in range(2)]
    threads[0].start()
    assert fake.hanging.wait(30)
    threads[1].start()
    fake.go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(folders) == 2
    assert len(set(folders)) == 1
    assert len(fake.fetched()) == 7  # the header that hung, twice


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", HubId("Qwen/Qwen3-VL-8B-Instruct", "main")),
        ("moonshotai/Kimi-K2.5@refs/pr/3", HubId("moonshotai/Kimi-K2.5", "refs/pr/3")),
        ("a/b@v1", HubId("a/b", "v1")),
        ("/models/qwen", None),
        ("../models", None),
        ("checkpoint", None),
        ("a/b/c", None),
        ("a/b@", None),
    ],
)
def test_ids_of_a_hub_are_told_from_paths(model: str, found: HubId | None) -> None:
    assert hub_id(Path(model)) == found


def test_a_folder_that_exists_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "model").mkdir(parents=True)
    assert hub_id(Path("acme/model")) is None
    assert hub_id(Path("acme/other")) == HubId("acme/other", "main")


def test_a_folder_is_nothing_to_download(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["download", str(tmp_path)])
    assert ended.exit_code == 1
    assert "needs ORG/NAME" in ended.stderr
