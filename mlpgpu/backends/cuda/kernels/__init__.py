"""The table of kernels: what each entry is called, what it takes, and how it is launched.

Nothing here needs a GPU, a driver or a compiler.  :mod:`.entry` says what an entry is; each family of
kernels has a file, with their entries, block sizes and grids; :mod:`.table` has all of them.  Callers
need not know the families: all public names stand here.
"""

# ruff: noqa: F403

from .dense import *
from .entry import *
from .local import *
from .losses import *
from .metrics import *
from .network import *
from .operand_format import *
from .parts import *
from .primitives import *
from .row_step import *
from .rows import *
from .split_operands import *
from .table import *
from .tensor import *
from .updates import *
from .whole_batch import *
