"""The page, report.html."""
