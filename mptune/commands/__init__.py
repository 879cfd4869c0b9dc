"""The commands of ``mptune``, by subject. ``mptune.cli`` puts them together."""
