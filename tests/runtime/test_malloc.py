"""What the engine core frees stays in the heap, where the next step finds it."""

import subprocess
import sys

SCRIPT = """
import sys, threading
from kvasir_runtime.malloc import keep_freed_memory, share_one_arena
if sys.argv[1] == "keep":
    share_one_arena()
import torch

def heap():
    [line] = [line for line in open("/proc/self/maps") if "[heap]" in line]
    begin, end = line.split()[0].split("-")
    return range(int(begin, 16), int(end, 16))

def step():
    tensor = torch.empty(100 << 20, dtype=torch.uint8)
    addresses.append(tensor.data_ptr())

if sys.argv[1] == "keep":
    keep_freed_memory()
addresses = []
thread = threading.Thread(target=step)
thread.start()
thread.join()
print(addresses[0] in heap())
"""


def lies_in_heap_when_freed(mode: str) -> str:
    result = subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_a_large_tensor_of_a_step_stays_in_the_heap_when_it_is_freed() -> None:
    assert lies_in_heap_when_freed("keep") == "True"
    assert lies_in_heap_when_freed("give back") == "False"
