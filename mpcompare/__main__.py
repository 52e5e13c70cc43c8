"""``python -m mpcompare``: compose the configuration, run, save. ``--help`` says how."""

import os
import sys
import traceback
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

import mpcompare
from mpcompare.command import entry_points
from mpcompare.command.faults import check_dashed, known_fault, unknown_key
from mpcompare.command.job import run
from mpcompare.command.verbs import as_module, run_verb
from mpcompare.errors import InputError, did_you_mean, fail
from mpcompare.interrupt import ends_when_interrupted
from mpcompare.paths import CONF
from mpcompare.streams import lasting


@lasting()
@ends_when_interrupted()
def main() -> None:
    """The command line: what a user got wrong is one line, and only a fault of ours is a traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors up instead of printing them
    try:
        Path.cwd()
    except OSError as error:
        fail(f"the working directory cannot be used ({error.strerror}): change into another")
    as_module()
    try:
        if run_verb(sys.argv[1:], mpcompare.__version__):
            return
        check_dashed(sys.argv[1:])
        entry_points.register()
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(run)()
    except MissingConfigException as error:
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if not (known := error.options):
            fail(str(error))
        inside = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        if "/" in group and not {*inside} & {*known}:
            group, _, folder = group.partition("/")  # a folder of options within a group: backend=mistake/NAME
            name, known = f"{folder}/{name}", [f"{folder}/{each}" for each in inside] or known
        fail(f"{group}={name}: expected one of {', '.join(known)}{did_you_mean(name, known)}")
    except (HydraException, OmegaConfBaseException) as error:
        if said := unknown_key(error):
            fail(said)
        override = getattr(error, "override", None)  # an override that does not parse
        if override and "," in (override[0], override[-1]):
            fail(f"{override}: expected no blank before or after a comma")
        fail(f"{override + ': ' if override else ''}{error} {error.__cause__ or ''}")
    except InputError as error:
        fail(str(error))
    except OSError as error:
        if not (fault := known_fault(error)):
            raise
        fail(fault)
    except ValueError as error:
        innermost = list(traceback.walk_tb(error.__traceback__))[-1][0]
        if not innermost.f_globals["__name__"].startswith("hydra"):
            raise
        fail(str(error))


if __name__ == "__main__":
    main()
