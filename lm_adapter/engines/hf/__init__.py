"""The reference language models of ``transformers`` with rows from the service.

- ``checkpoint``  what config.json states: placeholder ids, geometry, family
- ``model``       loads the language model of a checkpoint, without its tower
- ``driver``      ``RemoteVisionLM``: chunked prefill and greedy decoding with spliced rows

Importing this package imports neither torch nor transformers.
"""

from lm_adapter.engines.hf.driver import Prefilled, RemoteItem, RemoteVisionLM
from lm_adapter.engines.hf.model import import_transformers, load_language_model

__all__ = ["Prefilled", "RemoteItem", "RemoteVisionLM", "import_transformers", "load_language_model"]
