"""Prints the N-th `sh` block of README.md: python tools/readme_command.py N"""

import re
import sys
from pathlib import Path

readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
blocks = re.findall(r"^```sh\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
print(blocks[int(sys.argv[1]) - 1], end="")
