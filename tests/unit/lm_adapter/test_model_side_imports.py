"""What ``import lm_adapter`` reaches."""

from __future__ import annotations

from tests.unit.lm_adapter.interpreter import output_of


def test_importing_the_adapter_reaches_few_modules_and_nothing_heavy() -> None:
    code = (
        "import inspect, sys\n"
        "import lm_adapter\n"
        "ours = [m for n, m in sys.modules.items() if n.partition('.')[0] == 'lm_adapter']\n"
        "print(len(ours), sum(len(inspect.getsource(m).splitlines()) for m in ours))\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'triton', 'cuda', 'blake3', 'encoder_service')\n"
        "assert not [n for n in sys.modules if n.partition('.')[0] in heavy]\n"
    )
    num_modules, num_lines = map(int, output_of(code).split())
    assert num_modules <= 25
    assert num_lines <= 3750  # 250 of them are fleets
