"""How the policies were found and the small models trained: README.md says what is here."""
