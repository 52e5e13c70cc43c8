"""Where does each precision run? A backend watches one of its own steps, outside of the timed region."""
