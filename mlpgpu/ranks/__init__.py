"""Processes that train one network together, one a card: who they are, and what they tell each other.

They are started by ``mpirun``, ``srun`` or ``python -m mlpgpu launch``, and talk by MPI (extra ``mpi``).  Where there
is one process, nothing of MPI is imported.  ``docs/ranks.md`` is for who starts them.

The function :func:`mlpgpu.ranks` hides this package as an attribute: import from it, ``from mlpgpu.ranks import …``.
"""

from .agreement import check_agreement
from .communicator import Communicator
from .shared import share_memory
from .world import communicator, local_rank, on_one_host, rank, ranks

__all__ = [
    "Communicator",
    "check_agreement",
    "communicator",
    "local_rank",
    "on_one_host",
    "rank",
    "ranks",
    "share_memory",
]
