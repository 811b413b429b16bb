"""Storage: files replaced as a whole, the HDF5 container of networks and runs, and descriptions as JSON."""

from __future__ import annotations

from .container import FORMAT_VERSION as FORMAT_VERSION
from .container import Contents as Contents
from .container import OpenFile as OpenFile
from .container import Pieces as Pieces
from .container import image as image
from .container import open_file as open_file
from .container import parse as parse
from .container import read as read
from .container import write as write
from .container import write_pieces as write_pieces
