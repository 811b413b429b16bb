"""The card: its driver, nvcc, and clocks.  The one package that imports PyCUDA and cuda-bindings.

Callers need not know the files: what they use stands here.
"""

from .descriptors import Texture, tensor_map
from .device import Device
from .graphs import Graph, Replay, capture
from .links import LinkedCards, Words
from .machine import count_devices, describe_machine, find_device
from .memory import Arena, aligned, card_of_address, pinned
from .messages import Message, Place
from .modules import ExtendedModule, Function, LoadedKernels, Module, PreparedLaunch, module_of, pack
from .nccl import JoinedCards, check_nccl, new_identity
from .part_sums import ExchangedSums
from .streams import Event, Stream, wait_for_stream
from .timing import MOST_REPEATS, TRIALS, Stopwatch, seconds_of

__all__ = [
    "MOST_REPEATS",
    "TRIALS",
    "Arena",
    "Device",
    "Event",
    "ExchangedSums",
    "ExtendedModule",
    "Function",
    "Graph",
    "JoinedCards",
    "LinkedCards",
    "LoadedKernels",
    "Message",
    "Module",
    "Place",
    "PreparedLaunch",
    "Replay",
    "Stopwatch",
    "Stream",
    "Texture",
    "Words",
    "aligned",
    "capture",
    "card_of_address",
    "check_nccl",
    "count_devices",
    "describe_machine",
    "find_device",
    "module_of",
    "new_identity",
    "pack",
    "pinned",
    "seconds_of",
    "tensor_map",
    "wait_for_stream",
]
