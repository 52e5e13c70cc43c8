"""The command line. Nothing outside of this room knows Hydra."""

from mpcompare.command import folders as folders  # the configuration names its resolver
