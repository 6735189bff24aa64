"""Other ways to do the same, each as its own users run it, to be timed beside unitsphere."""
