"""vLLM's own towers, on their own and of the same checkpoint, as the peers of the tower bench.

Owns their construction outside of a server, their weights, and vLLM's own encoder graphs;
``engine_families.py`` says which modules they are. An instance of vLLM's model class holds them, without a
language model: its weight names load them, and its methods serve vLLM's graph manager.

* ``vllm``: eager, as a server runs it by default; the grids' tables are computed in every run.
* ``vllm_graphs``: vLLM's ``EncoderCudaGraphManager`` with one budget of exactly the case's rows and images,
  so that nothing is padded. A server has budgets of powers of two. Its graphs are for images.

What vLLM compiles beside the blocks (the interpolation of Kimi's position table) runs eagerly.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from bench.engine_families import MODELS, PEERS_OF_FAMILIES, named, text_width
from bench.references import LeftOut
from encoder_service.types import Grid

VLLM, VLLM_GRAPHS = "vllm", "vllm_graphs"
PEERS = (VLLM, VLLM_GRAPHS)
# FlashAttention 3, which both sides have on Hopper, in every tower of a CUDA device.
CUDA_ATTENTION, CUDA_ATTENTION_VERSION = "FLASH_ATTN", 3


def engine_config(device: torch.device) -> Any:
    """vLLM's configuration of a server with one rank, as far as towers read it."""
    config = importlib.import_module("vllm.config")
    settings: dict[str, Any] = {"device_config": config.DeviceConfig(device.type)}
    backend = None
    if device.type == "cuda":
        backend = CUDA_ATTENTION
        settings["attention_config"] = config.AttentionConfig(flash_attn_version=CUDA_ATTENTION_VERSION)
    found = config.VllmConfig(**settings)
    media = config.MultiModalConfig(limit_per_prompt={"video": 0}, mm_encoder_attn_backend=backend)
    found.model_config = SimpleNamespace(
        multimodal_config=media, get_multimodal_config=lambda: media, is_moe=False, is_diffusion=False
    )
    return found


@contextlib.contextmanager
def ranks(device: torch.device) -> Iterator[None]:
    """vLLM's layers ask for its ranks, here one. Raises LeftOut if there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise LeftOut("vLLM is not installed")
    distributed = importlib.import_module("vllm.distributed")
    in_config = importlib.import_module("vllm.config").set_current_vllm_config
    with tempfile.TemporaryDirectory() as folder, in_config(engine_config(device)):
        distributed.init_distributed_environment(1, 0, f"file://{folder}/ranks", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        if device.type == "cuda":
            # Else vLLM puts a stream of its own in the place of the current one when it first asks for it.
            torch.cuda.set_stream(torch.cuda.current_stream(device))
        try:
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()


class EngineTower:
    """vLLM's tower and projector of a checkpoint, in ``dtype`` on ``device``. Has to be made and used within
    ``ranks``. Raises LeftOut for a family that vLLM has no tower of, and vLLM's errors."""

    def __init__(self, family: str, path: Path, *, device: torch.device, dtype: torch.dtype) -> None:
        if family not in PEERS_OF_FAMILIES:
            raise LeftOut(f"vLLM has no tower of {family}")
        self._peer, self._device, self._dtype = PEERS_OF_FAMILIES[family], device, dtype
        self._config = engine_config(device)
        config = json.loads((path / "config.json").read_text())
        in_config = importlib.import_module("vllm.config").set_current_vllm_config
        in_dtype = importlib.import_module("vllm.utils.torch_utils").set_default_torch_dtype
        with in_config(self._config), in_dtype(dtype):
            with torch.device(device):
                self._model = self._empty(config)
            self._load(path)
        self.attention = self._attention()

    def rows(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        """[R, D * (1 + L)] of pixels [P, patch_dim] in the tower's dtype, on its device."""
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            return self._peer.rows(self._model, pixels, grids)

    def graphs(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> Callable[[], torch.Tensor]:
        """A step of vLLM's graph manager, captured for these grids. Raises LeftOut."""
        interfaces = importlib.import_module(f"{MODELS}.interfaces")
        if self._device.type != "cuda":
            raise LeftOut(f"graphs need a CUDA device, this is {self._device}")
        if not interfaces.supports_encoder_cudagraph(self._model):
            raise LeftOut("vLLM has no encoder graphs of this family")
        if any(grid.t > 1 for grid in grids):
            raise LeftOut("vLLM's graphs of images take no frames")
        module = importlib.import_module("vllm.v1.worker.encoder_cudagraph")
        settings = self._config.compilation_config
        num_rows = sum(grid.num_patches for grid in grids) // 4
        settings.encoder_cudagraph_token_budgets = [num_rows]
        settings.encoder_cudagraph_max_vision_items_per_batch = len(grids)
        inputs = self._peer.inputs(pixels, grids)
        # vLLM captures on the current stream, which must not be the default one.
        with torch.compiler.set_stance("force_eager"), torch.cuda.stream(torch.cuda.Stream(self._device)):
            manager = module.EncoderCudaGraphManager(self._config, self._device, self._dtype, self._model)
            manager.capture(torch.cuda.graph_pool_handle())
        torch.cuda.synchronize(self._device)

        def run() -> torch.Tensor:
            with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
                return torch.cat(manager.execute(inputs))

        run()
        if manager.graph_misses:
            raise LeftOut(f"vLLM ran {manager.graph_misses} of {len(grids)} images without a graph")
        return run

    def _empty(self, config: Mapping[str, Any]) -> Any:
        """An instance of vLLM's model class that has only the tower and the projector."""
        module, name = self._peer.model
        model_class = getattr(importlib.import_module(f"{MODELS}.{module}"), name)
        model: Any = model_class.__new__(model_class)
        torch.nn.Module.__init__(model)
        for child, part in self._peer.modules(config).items():
            setattr(model, child, part)
        # What the methods of the graphs read of a model.
        model.config = named(config)
        model.hidden_size = text_width(config)
        model.model_config = self._config.model_config
        model.multimodal_config = self._config.model_config.multimodal_config
        model.use_data_parallel = model.is_multimodal_pruning_enabled = False
        model.get_max_frames_per_video = lambda: 1
        return model.eval()

    def _load(self, path: Path) -> None:
        """Every parameter from the checkpoint, which has to have no other tensors than the tower's."""
        utils = importlib.import_module(f"{MODELS}.utils")
        model = self._model
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            tensors |= load_file(file)
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        loaded = utils.AutoWeightsLoader(model).load_weights(tensors.items(), mapper=mapper)
        if missing := dict(model.named_parameters()).keys() - loaded:
            raise ValueError(
                f"vLLM loaded no values of {', '.join(sorted(missing)[:3])}: {len(missing)} in all"
            )
        for part in model.modules():
            if (method := getattr(part, "quant_method", None)) is not None:
                method.process_weights_after_loading(part)
        model.requires_grad_(False)

    def _attention(self) -> str:
        """vLLM's attention in the tower. Raises LeftOut if it is not the one that was asked for."""
        kind = importlib.import_module("vllm.model_executor.layers.attention").MMEncoderAttention
        layers = [part for part in self._model.modules() if isinstance(part, kind)]
        found = {f"{layer.attn_backend.name} {layer._fa_version}" for layer in layers}
        if self._device.type == "cuda" and found != {f"{CUDA_ATTENTION} {CUDA_ATTENTION_VERSION}"}:
            raise LeftOut(
                f"vLLM's tower has attention {found}, not {CUDA_ATTENTION} {CUDA_ATTENTION_VERSION}"
            )
        return ", ".join(sorted(found))
