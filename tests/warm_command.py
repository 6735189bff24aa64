"""`unitsphere ...` in processes of their own that need not import torch first: forks of one that has.

Each line of its standard input is JSON and asks for a process (words, env, cwd, and the files for its output), whose
number is the answer, or for the exit status of one (pid), null while it has not ended. The one that forks imports and
does nothing else, so its forks are as fresh as a new process.
"""

import importlib
import json
import os
import sys

import unitsphere.cli

for name in ("torch.utils.tensorboard", "unitsphere.jobs.pretrain", "unitsphere.evaluation.evaluate"):
    importlib.import_module(name)


def become(words: list[str], env: dict[str, str], cwd: str, stdout: str, stderr: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for file, number, flags in ((os.devnull, 0, os.O_RDONLY), (stdout, 1, os.O_WRONLY), (stderr, 2, os.O_WRONLY)):
        os.dup2(os.open(file, flags), number)
    sys.exit(unitsphere.cli.main(words))


def status(pid: int) -> int | None:
    ended, found = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(found) if ended else None


for line in sys.stdin:
    asked = json.loads(line)
    answer = status(**asked) if "pid" in asked else os.fork()
    if answer == 0 and "pid" not in asked:
        become(**asked)
    print(json.dumps(answer), flush=True)
