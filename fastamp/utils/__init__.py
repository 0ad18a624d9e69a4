"""Mirrors of `torch.utils` modules in which fastamp's functions stand in for torch's."""
