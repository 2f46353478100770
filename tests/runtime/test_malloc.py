"""What the engine core frees is used again."""

import subprocess
import sys

FAULTS = """
import resource, sys, threading
from kvasir_runtime.malloc import keep_freed_memory, share_one_arena
if sys.argv[1] == "keep":
    share_one_arena()
import torch

def step():
    for _ in range(5):
        torch.ones(8 * 1024 * 1024)

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    keep_freed_memory()
faults_of_a_step()
print(faults_of_a_step())
"""


def page_faults(mode: str) -> int:
    return int(subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, check=True).stdout)


def test_a_steps_memory_is_used_again_without_page_faults() -> None:
    assert page_faults("keep") < 1000 < page_faults("give back")
