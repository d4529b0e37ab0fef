"""vLLM's early question to the encoder, from a process of its own: before any model is loaded.

Owns that process. The API server does not ask by itself: it has yet to fork vLLM's other processes, and gRPC
does not survive a fork. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys

from lm_adapter.engines.shared.agreement import Agreement
from lm_adapter.engines.shared.encoder_thread import DISAGREEMENTS, EncoderThread
from lm_adapter.engines.shared.first_contact import ANSWER_S
from lm_adapter.engines.shared.geometry import Geometry
from lm_adapter.engines.vllm.settings import Settings
from lm_adapter.errors import ModelMismatch

PROCESS_S = 20.0
"""Limit on the process, whose imports take a second on an idle machine."""

logger = logging.getLogger("vllm.vision_encoder")


def check_early(agreement: Agreement) -> None:
    """Raises ModelMismatch if the encoder answers and disagrees. The scheduler's process asks again once the
    model is loaded, and says so if there is no answer then."""
    question = dataclasses.asdict(agreement)
    try:
        process = subprocess.run(  # noqa: S603 - this module
            [sys.executable, "-m", __name__],
            input=json.dumps(question),
            stdout=subprocess.PIPE,
            text=True,
            timeout=PROCESS_S,
            check=True,
        )
        answer = json.loads(process.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("the encoder was not asked before the model is loaded: %s", error)
        return
    if "disagreement" in answer:
        raise ModelMismatch(answer["disagreement"], reason=answer["reason"])


def main() -> None:
    """In the process: the agreement comes at the input, the encoder's disagreement goes to the output."""
    question = json.load(sys.stdin)
    agreement = Agreement(Settings.read(question["settings"]), Geometry(**question["geometry"]))
    thread = EncoderThread(agreement, name="contact")
    error = thread.contact(ANSWER_S)
    thread.close()
    answer = {}
    if isinstance(error, DISAGREEMENTS):
        answer = {"disagreement": error.message, "reason": error.reason}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
