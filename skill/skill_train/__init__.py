"""skill-train: the fine-tune that proves itself."""

from importlib import metadata

try:
    __version__ = metadata.version("skill-train")
except metadata.PackageNotFoundError:  # a source tree that nobody installed
    __version__ = "0+unknown"
