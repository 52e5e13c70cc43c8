"""Does a backend compute the same? What is found by examining it, and what that means."""
