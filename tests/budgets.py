"""Sizes that grow only by a decision, which changes a limit here. `make lint` runs this."""

import inspect
import re
import sys
from pathlib import Path

import lm_adapter
from encoder_service.config import Settings

adapter = [module for name, module in sys.modules.items() if name.split(".")[0] == lm_adapter.__name__]
service = "".join(path.read_text() for path in Path("encoder_service").rglob("*.py"))
sizes = {
    "modules that `import lm_adapter` loads": (len(adapter), 25),
    "their lines": (sum(len(inspect.getsource(module).splitlines()) for module in adapter), 3760),
    "settings": (len(Settings.model_fields), 64),
    "metrics": (len({re.sub("_total$", "", name) for name in re.findall(r'"(ve_[a-z0-9_]+)"', service)}), 63),
    "lines of README.md": (len(Path("README.md").read_text().splitlines()), 150),
}
if above := [f"{what}: {size}, at most {limit}" for what, (size, limit) in sizes.items() if size > limit]:
    sys.exit("\n".join(above))
