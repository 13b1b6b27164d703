"""The tables of docs/results, written from the data beside them."""
