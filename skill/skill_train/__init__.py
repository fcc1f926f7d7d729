"""skill-train: the fine-tune that proves itself."""


def __getattr__(name: str) -> str:
    """`__version__`, read when somebody asks: importlib.metadata takes a quarter of the time of `--help`."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("skill-train")
    except metadata.PackageNotFoundError:  # a source tree that nobody installed
        return "0+unknown"
