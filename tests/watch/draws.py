"""The draws whose bugs have right twins."""

from watch.fourth_draw.every import BUGS as FOURTH
from watch.second_draw.every import BUGS as SECOND
from watch.third_draw.every import BUGS as THIRD

DRAWS = {"second": SECOND, "third": THIRD, "fourth": FOURTH}
