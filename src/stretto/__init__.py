"""stretto: train any PyTorch model on any number of devices, with the numbers of one device."""
