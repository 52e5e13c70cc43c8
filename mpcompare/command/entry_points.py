"""Backends of installed packages. A package that names one in its ``pyproject.toml`` makes ``backend=my_amp`` known:

    [project.entry-points."mpcompare.backends"]
    my_amp = "my_amp.backend:MyAmp"

The package is not imported for that: an entrant imports the class of the backend that was chosen, in its own process.
So the options of the class are not known when the configuration is composed. Its node takes any key
(``backend.KEY=VALUE``), and the Plan refuses keys that the constructor does not take.
"""

from importlib import metadata

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from mpcompare.errors import InputError
from mpcompare.paths import CONF

GROUP = "mpcompare.backends"


def register() -> None:
    """Adds the backends of installed packages to Hydra's group ``backend``. Raises InputError where a backend has a
    name that this project or another package has already given to one."""
    taken = {path.stem: "this project" for path in (CONF / "backend").glob("*.yaml")}
    for entry in metadata.entry_points(group=GROUP):
        package = _package(entry)
        if taken.get(entry.name, package) != package:
            raise InputError(
                f"entry point {entry.name} in {GROUP}", entry.value,
                f"{package} gives a backend a name that {taken[entry.name]} has: uninstall it, or rename its backend",
            )  # fmt: skip
        taken[entry.name] = package
        target = ".".join(filter(None, (entry.module, entry.attr)))
        node = OmegaConf.create({"_target_": target})
        OmegaConf.set_struct(node, False)
        ConfigStore.instance().store(group="backend", name=entry.name, node=node, provider=package)


def origin(name: str) -> str:
    """Returns `` of package NAME VERSION`` if the backend ``name`` comes from an entry point; else an empty string."""
    packages = {entry.name: _package(entry) for entry in metadata.entry_points(group=GROUP)}
    return f" of {packages[name]}" if name in packages else ""


def _package(entry: metadata.EntryPoint) -> str:
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist else "a package"
