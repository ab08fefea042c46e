"""Types the shell examples of README and docs into one shell, in order: ``python -m
tests.follow_docs``

To be run in a fresh clone. Each command must end with 0. Left out, and named: commands with a
placeholder in capitals, and those that need other hosts or root.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import ROOT

ORDER = ["README.md", "docs/index.md", "docs/guides/recipes.md"]
"""These first, since others use what they make; then all the others by name."""
NOT_HERE = {
    r"\b(FOLDER|PHOTOS|IMAGES|DATE_TIME)|\b(RUN|TRAIN)\b": "needs files of the reader's",
    r"\bhost1\b|\ba:4\b": "needs other hosts",
    r"\bsudo\b": "needs root",
    r"^#!|^#SBATCH|\bsrun\b|\bsbatch\b": "needs Slurm",
    r"\.ci/run|\bpytest\b": "the tests",
    r"benchmarks\.gpu": "needs a GPU",
    r"large_batch\.py|--seeds 0:1000|tests\.chaos": "takes an hour",
}
SERVERS = re.compile(r"^(tensorboard|mkdocs serve)\b")
SERVER_SECONDS = 20.0  # after which a server that still runs is one that started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="all by default")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for a command")
    parser.add_argument(
        "--log", type=Path, default=Path("follow_docs.log"), help="what the commands print"
    )
    options = parser.parse_args()
    failed = 0
    with options.log.open("wb") as log:
        shell = Shell(log)
        for page in options.pages or pages():
            for line, command in commands(Path(page)):
                reasons = [why for pattern, why in NOT_HERE.items() if re.search(pattern, command)]
                reason = reasons[0] if reasons else None
                log.write(f"\n$ {command}\n".encode())
                log.flush()
                began = time.monotonic()
                code = shell.run(command, options.timeout) if reason is None else 0
                failed += code != 0
                said = f"left out: {reason}" if reason else f"FAILED with {code}" if code else "ok"
                seconds = time.monotonic() - began
                print(f"{page}:{line}  {seconds:5.0f} s  {said:12} {command}", flush=True)
        shell.close()
    print(f"{failed} failed")
    return int(failed > 0)


def pages():
    found = (*ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md")
    others = {str(path.relative_to(ROOT)) for path in found}
    return [*ORDER, *sorted(others - {*ORDER})]


def commands(page):
    """Line number and text of each command in the blocks of ``bash``, without comments."""
    found, inside, pending = [], False, ""
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = line == "```bash"
            continue
        text = re.sub(r"(^|\s)#(?!!|SBATCH).*$", "", line).strip() if inside else ""
        if text.endswith("\\"):
            pending += text[:-1]
        elif text or pending:
            found.append((number, pending + text))
            pending = ""
    return found


class Shell:
    """One bash, to which commands are typed. It leads a session, so that what hangs can be
    ended.
    """

    def __init__(self, log):
        output = {"stdin": subprocess.PIPE, "stdout": log, "stderr": log, "start_new_session": True}
        self._process = subprocess.Popen(["bash", "--norc"], cwd=ROOT, **output)

    def run(self, command, timeout):
        """The exit code; 124 after ``timeout`` seconds. A server is ended, and 0 if it ran until
        then.
        """
        server = SERVERS.match(command) is not None
        code = Path(f"/tmp/follow_docs.{os.getpid()}")
        code.unlink(missing_ok=True)
        self._process.stdin.write(
            f"{{ {command}; }} </dev/null\necho $? >{code}.new; mv {code}.new {code}\n".encode()
        )
        self._process.stdin.flush()
        deadline = time.monotonic() + (SERVER_SECONDS if server else timeout)
        while not code.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        late = not code.exists()
        while not code.exists():
            subprocess.run(["pkill", "-INT", "-P", str(self._process.pid)], check=False)
            time.sleep(1)
            subprocess.run(["pkill", "-KILL", "-P", str(self._process.pid)], check=False)
        ended = int(code.read_text())
        code.unlink()
        return (0 if server else 124) if late else ended

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
