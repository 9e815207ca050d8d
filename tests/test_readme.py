"""The code of the README runs as it is printed."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run_in_order():
    text = README.read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks, "The README has no ```python block."
    namespace = {"__name__": "readme"}
    for block in blocks:
        # Blank lines in front give tracebacks the line numbers of the README.
        lines_before = text.count("\n", 0, block.start(1))
        exec(compile("\n" * lines_before + block[1], str(README), "exec"), namespace)
