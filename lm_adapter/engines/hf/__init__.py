"""The reference language models of ``transformers`` with rows from the service.

- ``model``       loads the language model of a checkpoint, without its tower
- ``driver``      ``RemoteVisionLM``: chunked prefill and greedy decoding with spliced rows
- ``transformers_import``  imports ``transformers`` beside any build of torchvision

Importing this package imports neither torch nor transformers.
"""

from lm_adapter.engines.hf.driver import Prefilled, RemoteItem, RemoteVisionLM
from lm_adapter.engines.hf.model import load_language_model
from lm_adapter.engines.hf.transformers_import import import_transformers

__all__ = ["Prefilled", "RemoteItem", "RemoteVisionLM", "import_transformers", "load_language_model"]
