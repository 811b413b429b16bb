"""The package's version, apart so that setup.cfg and every module can read it."""

__version__ = "0.1.0"
