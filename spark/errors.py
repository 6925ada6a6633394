"""What keeps a run from being carried out. Every text is one line that names the thing and the remedy."""


class CannotRun(Exception):
    """The run did not happen, or its result cannot be trusted; exit status 2. The lake is as it was or can go on."""


class AnotherRun(CannotRun):
    """Another run is at work on the same lake."""
