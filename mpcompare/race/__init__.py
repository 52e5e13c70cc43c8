"""The race: the turns of its entrants, and the intervals of what was measured."""
