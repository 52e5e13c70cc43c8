"""Builds and loads the native operators for the device that torch sees, and prints the messages of the compilers.

python scripts/build_ops.py
"""

import logging
import sys
import time

from mpcompare.instruments import machine
from mpcompare.native import ops
from mpcompare.native.build import BuildError

logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("mpcompare").setLevel(logging.DEBUG)
device, start = machine.select_device("auto"), time.monotonic()
try:
    ops.load(device.type)
except BuildError as error:
    sys.exit(str(error))
print(f"native operators for {device.type}, built or found and loaded in {time.monotonic() - start:.1f} s")
