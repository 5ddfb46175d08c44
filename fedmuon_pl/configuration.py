"""Short names of configuration files: ``-c algorithm/fedmuon``."""

from pathlib import Path

__all__ = ["config_folders", "find_config"]


def config_folders() -> list[Path]:
    """Where short names are looked up: ``./configs``, then the configurations of the package."""
    package = Path(__file__).resolve().parent
    # A wheel carries them inside the package; a source tree has them beside it.
    own = package / "configs"
    return [Path("configs"), own if own.is_dir() else package.parent / "configs"]


def find_config(name: str) -> Path:
    """The file of a configuration.

    Args:
        name: A path to a file, which wins; else a name below a folder of configurations, without
            ``.yaml``, such as ``experiment/mnist5k``.

    Raises:
        FileNotFoundError: If there is none; the message lists what there is.
    """
    if Path(name).is_file():
        return Path(name)
    for folder in config_folders():
        path = folder / f"{name}.yaml"
        if path.is_file():
            return path
    group = config_folders()[-1] / Path(name).parent
    there = sorted(str(Path(name).parent / p.stem) for p in group.glob("*.yaml"))
    known = f"; there are {', '.join(there)}" if there else ""
    raise FileNotFoundError(f"no configuration file or name {name!r}{known}")
