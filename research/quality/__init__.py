"""The accuracy of served models, and the training of a small one."""
