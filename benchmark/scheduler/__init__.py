"""Host time of the scheduler, without a model."""
