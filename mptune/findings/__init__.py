"""The table of findings, by subject of their codes; ``mptune.finding.CODES`` puts them together."""
