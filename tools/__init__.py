"""Programs for those who change the project."""
