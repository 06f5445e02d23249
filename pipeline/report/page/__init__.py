"""The page of a report: one HTML file that needs nothing else, made from the tables that were written."""
