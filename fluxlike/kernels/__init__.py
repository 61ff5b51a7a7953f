"""What runs on the device: Triton only, no torch.distributed, no allocation, no host state."""
