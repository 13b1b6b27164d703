"""Tables of studies, which no page of docs/results has."""
