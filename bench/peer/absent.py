"""The one reason for which a peer is left out."""


class Absent(Exception):  # noqa: N818  # a finding, not a fault
    """A peer cannot be had here, did not start or died; what it says is why."""
