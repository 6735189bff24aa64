"""`antipode ...` in processes of their own that need not import torch first: forks of one that has.

Each line of its standard input asks for a process: JSON with words, env, cwd, and the files for its output; the answer
is the exit status. The one that forks imports and does nothing else, so its forks are as fresh as a new process.
"""

import importlib
import json
import os
import sys

import antipode.cli

for name in ("torch.utils.tensorboard", "antipode.training.pretrain", "antipode.evaluation.evaluate"):
    importlib.import_module(name)


def become(words: list[str], env: dict[str, str], cwd: str, stdout: str, stderr: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for file, number, flags in ((os.devnull, 0, os.O_RDONLY), (stdout, 1, os.O_WRONLY), (stderr, 2, os.O_WRONLY)):
        os.dup2(os.open(file, flags), number)
    sys.exit(antipode.cli.main(words))


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        become(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
