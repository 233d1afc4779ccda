"""How long a finished run takes when it is run again, and that it starts no server. Quiet machine; not a test.

python benchmarks/repeat.py params/local.yaml [-n 3]
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from eagle3kit.params import load_file
from eagle3kit.rundir import project_path


def main() -> None:
    """Run it `-n` times; print the seconds of each, the median and the range."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("-n", type=int, default=3)
    options = parser.parse_args()
    params = load_file(options.file)
    logs = project_path(params.runs_dir) / params.run_name / "logs"
    seconds = []
    for _ in range(options.n):
        before = {path: path.stat().st_mtime for path in logs.glob("*.log")}
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "eagle3kit.cli", "run", str(options.file)], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - began)
        worked = [path.name for path in logs.glob("*.log") if before.get(path) != path.stat().st_mtime]
        print(f"{seconds[-1]:.1f} s, processes started: {worked or 'none'}", flush=True)
    print(f"median {statistics.median(seconds):.1f} s, {min(seconds):.1f} to {max(seconds):.1f} s")


if __name__ == "__main__":
    main()
