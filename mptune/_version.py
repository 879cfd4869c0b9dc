"""The version, alone: whoever needs it imports no other part of the package."""

__version__ = "0.2.0"
