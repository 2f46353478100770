"""An engine that sleeps: it answers nothing, and its memory is others' until it is woken.

At level 1 the KV cache's memory is given back, at level 2 the weights' as well, which are loaded again on waking. API
processes give up what they have under way when they hear of it, so the core drops what still comes in.
"""

import gc
import sys

from kvasir_runtime.engine.channel import CoreChannel
from kvasir_runtime.engine.messages import ApiGone, Asleep, Sleep, WakeUp
from kvasir_runtime.malloc import give_back_freed_memory

KV_LEVEL, WEIGHTS_LEVEL = 1, 2
LEVELS = (KV_LEVEL, WEIGHTS_LEVEL)


def sleep_until_woken(channel: CoreChannel, level: int) -> None:
    channel.broadcast(Asleep(level=level))
    while True:
        for message in channel.receive(None):
            match message:
                case WakeUp():
                    return
                case Sleep():
                    channel.broadcast(Asleep(level=level))
                case ApiGone():
                    channel.forget(message.api_index)


def free_memory() -> None:
    """Behind the last use of a model in this process."""
    gc.unfreeze()
    gc.collect()
    torch = sys.modules.get("torch")  # which only a core with a rank in its process has
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    give_back_freed_memory()
