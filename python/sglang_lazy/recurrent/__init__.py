"""What chunks do to the states of recurrent layers."""
